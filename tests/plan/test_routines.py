"""What predicts refuses what the VM refuses, in the same words: of every program, whatever made it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import flywheel
from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig, validate
from flywheel.ir.compressed import LayeredTable
from flywheel.lowering.lower import lower
from flywheel.models.spec import DecoderSpec
from flywheel.plan.program import check_program, refusal_of
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.vm.pack import pack_any

FEW = replace(TARGETS["h100"], name="few", num_sms=6)
SPEC = DecoderSpec("small", "llama", 128, 256, 5, 4, 2, 32, 300, 1e4, 1e-6, 4096)


def refused_by_the_packer(program: MegakernelProgram) -> str | None:
    try:
        pack_any(program)
    except (ConfigError, InvalidProgramError) as error:
        return str(error)
    return None


def lowered(spec: DecoderSpec, context: int = 64, dtype: str = "bf16", **more: Any) -> MegakernelProgram:
    work = Workload(spec.name, spec, FEW, dtype, context, **more)
    return lower(work.graph, ScheduleConfig(), work.target)


@st.composite
def programs(draw: st.DrawFn) -> MegakernelProgram:
    """Decode steps of any shape and schedule of a search, among them many that no kernels run."""
    kv = draw(st.sampled_from((1, 2, 4)))
    spec = replace(
        SPEC,
        family=draw(st.sampled_from(("llama", "qwen2", "qwen3"))),
        hidden=128 * draw(st.sampled_from((1, 2, 80))),
        n_layers=draw(st.integers(1, 6)),
        n_kv_heads=kv,
        n_heads=kv * draw(st.sampled_from((1, 2, 8))),
        head_dim=draw(st.sampled_from((2, 4, 6, 32, 128, 256, 258, 512, 514))),
    )
    spec = replace(spec, qkv_bias=spec.family == "qwen2", qk_norm=spec.family == "qwen3")
    dtype = draw(st.sampled_from(("bf16", "f16", "f32")))
    batch, ranks = draw(st.sampled_from(((1, 1), (1, 1), (3, 1), (8, 1), (1, 2))))
    weights = None if dtype == "f32" or spec.q_width % 128 else draw(st.sampled_from((None, "int8", "fp8")))
    if kv % ranks:
        ranks = 1
    context = draw(st.sampled_from((33, 64, 500)))
    space = make_space(Workload("small", spec, FEW, dtype, context, batch, weights, ranks))
    choice = {each.name: draw(st.sampled_from(each.values)) for each in space.dimensions}
    return lower(space.workload.graph, space.to_config(choice), space.workload.target)


@given(program=programs())
@settings(max_examples=examples(150, 40))
def test_predictions_accept_a_program_exactly_where_packing_does(program: MegakernelProgram) -> None:
    assert validate(program, strict=True).ok
    assert refusal_of(program) == refused_by_the_packer(program)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lowered(replace(SPEC, head_dim=514)), "head_dim=514 is above 512"),
        (lowered(replace(SPEC, head_dim=6), 33), "a KV cache of 396 bytes, no multiple of 16"),
        (lowered(replace(SPEC, head_dim=6), 33, ranks=2), "a KV cache of 396 bytes, no multiple of 16"),
    ],
    ids=["heads", "caches", "caches of ranks"],
)
def test_a_model_that_no_kernels_run_is_named_by_its_task_or_buffer(program: MegakernelProgram, reason: str) -> None:
    found = refusal_of(program)
    assert found is not None and found.endswith(reason)
    assert found == refused_by_the_packer(program)


def test_a_fault_behind_the_layers_is_named_as_in_the_whole_program() -> None:
    """The check looks at few layers, in which later tasks have other numbers."""
    program = lowered(replace(SPEC, n_layers=9))
    buffers = program.buffers
    assert isinstance(buffers, LayeredTable)
    wrong = [replace(each, dtype=DType.F32) if each.name == "lm_head.w" else each for each in buffers.spelled]
    program = replace(program, buffers=LayeredTable(wrong, buffers.layers))
    found = refusal_of(program)
    assert found == refused_by_the_packer(program)
    first = next(task for task in program.tasks if task.label.startswith("lm_head"))
    assert found == f"task {first.id} ({first.label}): GEMV_TILE the matrix is F32, not BF16 as the program is"


def test_an_architecture_without_kernels_is_refused() -> None:
    program = lowered(SPEC)
    check_program(program)
    assert program.target is not None
    turing = replace(program, target=replace(program.target, sm_arch=75))
    with pytest.raises(ConfigError, match=r"^sm_arch=75: there are kernels for 80, "):
        check_program(turing)


def test_packing_refuses_nothing_by_itself() -> None:
    """A limit belongs in the plan, where predictions ask for it: the packer only encodes."""
    folder = Path(flywheel.__file__).parent / "vm" / "pack"
    raised = {
        f"{path.name}:{node.lineno}"
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and "InvalidProgramError" in ast.unparse(node)
    }
    assert raised == set()
