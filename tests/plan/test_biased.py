"""Quantised products with a bias: one step that reads the bias as it is, where nothing is lost by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.errors import InvalidProgramError
from flywheel.ir import TARGETS, DType, InstructionKind, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.formats import parse_formats
from flywheel.models.spec import DecoderSpec
from flywheel.plan.nodes import make_nodes
from flywheel.plan.program import make_plan
from flywheel.plan.rules import steps_of
from flywheel.plan.step import RESULT_REF, Form
from flywheel.vm.pack import pack

SPEC = DecoderSpec("small", "qwen2", 256, 384, 1, 4, 2, 64, 520, 1e5, 1e-5, 512, qkv_bias=True)
FUSED = (("attn_norm", "q_proj", "k_proj", "v_proj"),)
_K = InstructionKind


def program_of(batch: int, fused: bool) -> MegakernelProgram:
    graph = decode_step(SPEC, 64, DType.BF16, batch, parse_formats("int4", "bf16"))
    return lower(graph, ScheduleConfig(fusion_grouping=FUSED if fused else ()), TARGETS["h100"])


def biased(program: MegakernelProgram) -> list[Form]:
    """What tasks that multiply by a quantised matrix and have a bias run."""
    wanted = {"COPY", "DEQUANT"}
    forms = make_nodes(program, make_plan(program).grouping)[1]
    found = [form for form in forms if form.recipe and wanted <= {step.op.name for step in form.recipe.steps}]
    return [form for form in found if any(each.shape in ((256,), (128,)) for each in form.inputs[3:])]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("fused", [False, True], ids=["alone", "with the norm"])
def test_a_quantised_product_takes_its_bias_from_where_it_lies(fused: bool, batch: int) -> None:
    found = biased(program_of(batch, fused))
    assert found
    for form in found:
        steps = steps_of(form)
        (product,) = [step for step in steps if step.matrix]
        assert not {_K.COPY, _K.DEQUANT} & {step.op for step in steps}
        assert len(product.args) == 3
        assert product.args[2] < RESULT_REF


def test_a_bias_that_is_rounded_on_the_way_has_no_kernel() -> None:
    program = program_of(1, fused=False)
    buffers = tuple(
        replace(each, dtype=DType.F32) if each.name.endswith("q_bias.w") else each for each in program.buffers
    )
    assert buffers != tuple(program.buffers)
    with pytest.raises(InvalidProgramError, match="DEQUANT of rows of a I4 matrix has no kernel"):
        pack(replace(program, buffers=buffers))
