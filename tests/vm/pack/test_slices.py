"""Products whose operand is longer than the staging area: cut into slices of K, they mean the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, BufferKind, DType, MegakernelProgram, ScheduleConfig
from flywheel.ir.variant import MIN_STAGED_BYTES, SLICE_SUMS_BYTES
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.vm.abi import ABSENT, SPILLED, Epilogue, InstructionFlag, SegmentFlag, StepFlag
from flywheel.vm.pack import pack

IN, ACT, WEIGHT, OUT = BufferKind.IO_INPUT, BufferKind.ACTIVATION, BufferKind.WEIGHT, BufferKind.IO_OUTPUT
F32, BF16 = DType.F32, DType.BF16
Chain = Callable[..., MegakernelProgram]
Agree = Callable[..., None]
Limit = Callable[[DType, int, int], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """`limit(dtype, rows, fragments)`: two slices of so many rows have at most so many fragments each."""

    def lower_to(dtype: DType, rows: int, fragments: int) -> None:
        monkeypatch.setattr("flywheel.ir.variant.SUMS_BYTES", 64)
        nbytes = 64 + 2 * dtype.nbytes(rows * (fragments + (rows > 1)) * 16)
        for name in ("MAX_STAGED_BYTES", "MAX_INPUT_ROWS_BYTES", "MAX_STAGED_ROWS_BYTES"):
            monkeypatch.setattr(f"flywheel.ir.variant.{name}", nbytes)

    return lower_to


def slices_of(program: MegakernelProgram) -> list[int]:
    """Fragments of each slice of all matrix steps that are cut."""
    steps = pack(program).steps
    carries = [bool(flags & StepFlag.CARRIES) for flags in steps["flags"]]
    behind = [*carries[1:], False]
    return [int(blocks) for blocks, *cut in zip(steps["kblocks"], carries, behind, strict=True) if any(cut)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("fragments", [6, 14])
@pytest.mark.parametrize("depth", [520, 531, 1024])
@pytest.mark.parametrize("threads", [128, 320])
def test_slices_add_up_whatever_the_tiles(
    chain: Chain, agree: Agree, limit: Limit, dtype: DType, rows: int, fragments: int, depth: int, threads: int
) -> None:
    """Tiles of several passes, of parts of row blocks, with a bias and without."""
    limit(dtype, rows, fragments)
    buffers = {
        "x": (IN, dtype, (rows, depth)), "w": (WEIGHT, dtype, (150, depth)), "b": (WEIGHT, dtype, (150,)),
        "y": (OUT, dtype, (rows, 150)), "z": (OUT, F32, (rows, 150)),
    }  # fmt: skip
    tile = {"K": depth, "M_tile": rows}
    tasks = [
        ("GEMM_TILE", inputs, [out], {**tile, "n_off": start, "N_tile": width})
        for start, width in ((0, 101), (101, 39), (140, 10))
        for inputs, out in ((["x", "w"], "z"), (["x", "w", "b"], "y"))
    ]
    program = chain(buffers, tasks, ScheduleConfig(threads_per_block=threads))
    cut = slices_of(program)
    packed = pack(program)
    assert len(packed.steps) == len(cut) and sum(cut) == len(tasks) * -(-depth // 16)
    one_by_one = not any(packed.steps["flags"] & StepFlag.STAGED_AHEAD)  # where there would be more than seven
    assert max(cut) <= fragments * (2 if one_by_one else 1) and one_by_one == (depth == 1024 and fragments == 6)
    assert not (packed.instructions["flags"] & InstructionFlag.X_STAGED).any()
    fresh = packed.segments["flags"] & SegmentFlag.FRESH_X != 0
    assert fresh.sum() == len(cut)
    agree(program)


def test_only_the_last_slice_rounds_adds_and_stores(chain: Chain, limit: Limit) -> None:
    limit(BF16, 1, 30)
    buffers = {"x": (IN, BF16, (1, 1024)), "w": (WEIGHT, BF16, (20, 1024)), "b": (WEIGHT, BF16, (20,)),
               "y": (OUT, BF16, (1, 20))}  # fmt: skip
    tile = {"K": 1024, "n_off": 0, "N_tile": 20}
    packed = pack(chain(buffers, [("GEMV_TILE", ["x", "w", "b"], ["y"], tile)]))
    first, second, third = packed.steps
    assert [int(step["kblocks"]) for step in packed.steps] == [22, 22, 20]
    for step in (first, second):
        assert (step["out"], step["out_dtype"], step["out_numel"], step["n_args"]) == (ABSENT, F32, 20, 2)
        assert step["flags"] & StepFlag.INDEX_FROM_ZERO and step["scratch"] >= 22 * 32
    assert (third["out"], third["out_dtype"], third["n_args"]) == (0, BF16, 3)
    assert [bool(step["flags"] & StepFlag.CARRIES) for step in packed.steps] == [False, True, True]
    for step, flag in zip(packed.steps, (StepFlag.STAGE, StepFlag.STAGED_AHEAD, StepFlag.ALTERNATES), strict=True):
        assert step["flags"] & flag
    assert packed.segments["x_kblocks"].tolist() == [0, 22, 0]
    assert first["scratch"] != second["scratch"]
    row = 64 * 512
    assert packed.segments["src"].tolist() == [0, 22 * 512, 44 * 512]
    assert set(packed.segments["row_stride"].tolist()) == {row}


def made(op: str, args: list[dict[str, int]], out: Any, shape: tuple[int, int], **params: Any) -> dict[str, Any]:
    return {"op": op, "args": args, "out": out, "params": params, "out_shape": [*shape], "out_dtype": "BF16"}


@pytest.mark.parametrize("rows", [1, 8])
def test_residuals_and_gates_are_taken_in_by_the_last_slice(
    chain: Chain, agree: Agree, limit: Limit, rows: int
) -> None:
    limit(BF16, rows, 3)
    depth = 200
    buffers = {
        "x": (IN, BF16, (rows, depth)), "w": (WEIGHT, BF16, (48, depth)), "v": (WEIGHT, BF16, (48, depth)),
        "r": (IN, BF16, (rows, 48)), "y": (OUT, BF16, (rows, 48)), "z": (OUT, BF16, (rows, 48)),
    }  # fmt: skip
    tasks = []
    for start, width in ((0, 23), (23, 25)):
        tile = {"n_off": start, "N_tile": width, "M_tile": rows}
        residual = [
            made("GEMM_TILE", [{"in": 0}, {"in": 1}], 0, (rows, width), K=depth, M_tile=rows),
            made("COPY", [{"in": 2}], 1, (rows, width), M_tile=rows),
            made("ADD", [{"s": 0}, {"s": 1}], "final", (rows, width)),
        ]
        gated = [
            made("GEMM_TILE", [{"in": 0}, {"in": 1}], 0, (rows, width), K=depth, M_tile=rows),
            made("GEMM_TILE", [{"in": 0}, {"in": 2}], 1, (rows, width), K=depth, M_tile=rows),
            made("SILU_MUL", [{"s": 0}, {"s": 1}], "final", (rows, width)),
        ]
        tasks.append(("FUSED", ["x", "w", "r"], ["y"], {**tile, "recipe": {"steps": residual}}))
        tasks.append(("FUSED", ["x", "w", "v"], ["z"], {**tile, "recipe": {"steps": gated}}))
    program = chain(buffers, tasks)
    steps = pack(program).steps
    epilogues = {Epilogue(int(step["epilogue"])) for step in steps if step["flags"] & StepFlag.CARRIES}
    assert {Epilogue.ADD, Epilogue.SILU_MUL} <= epilogues
    agree(program)


def test_sums_that_do_not_fit_behind_their_operand_are_spilled(chain: Chain, agree: Agree, limit: Limit) -> None:
    limit(F32, 8, 31)
    buffers = {"x": (IN, F32, (8, 1024)), "w": (WEIGHT, F32, (256, 1024)), "y": (OUT, F32, (8, 256))}
    tile = {"K": 1024, "n_off": 0, "N_tile": 256, "M_tile": 8}
    program = chain(buffers, [("GEMM_TILE", ["x", "w"], ["y"], tile)])
    packed = pack(program)
    assert packed.workspace_stride >= 8 * 256 * 4
    assert packed.steps["scratch"][0] & SPILLED
    agree(program)


@pytest.mark.parametrize("data", [0, 1])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_decoder_whose_mlp_outgrows_the_area_is_what_it_was(
    agree: Agree, limit: Limit, data: int, fused: bool, batch: int
) -> None:
    spec = DecoderSpec("deep", "llama", 72, 200, 2, 4, 2, 16, 50, 1e4, 1e-5, 64)
    groups = (
        ("attn_norm", "q_proj", "k_proj", "v_proj"), ("o_proj", "attn_add"),
        ("mlp_norm", "gate_proj", "up_proj", "silu_mul"), ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
    )  # fmt: skip
    limit(BF16, batch, 4)
    config = ScheduleConfig(
        tiling={"gemv": {"N_tile": 32}, "attention": {"kv_block": 16}, "hand_off": {"data": data}},
        fusion_grouping=groups if fused else (),
    )
    few = replace(TARGETS["h100"], name="few", num_sms=3, note="")
    program = lower(decode_step(spec, 48, BF16, batch), config, few)
    assert slices_of(program)
    agree(program, 17)


def matrices(workload: Workload) -> list[int]:
    """Elements of each matrix that one layer and the head multiply by."""
    blocks = (workload.graph.prologue, workload.graph.layer, workload.graph.epilogue)
    return [
        block.tensors[op.inputs[1]].shape[0] * op.params["K"]
        for block in blocks for op in block.ops if "K" in op.params
    ]  # fmt: skip


def test_eight_sequences_of_llama3_8b_fit() -> None:
    spec = replace(CATALOG["llama3-8b"], n_layers=1)
    workload = Workload("llama3-8b", spec, TARGETS["h200"], "bf16", 512, 8)
    space = make_space(workload)
    for choice in space.known_good():
        for fuse in (0, 1):
            packed = pack(lower(workload.graph, space.to_config({**choice, "fuse.down": fuse}), workload.target))
            assert packed.variant.ring_slots * packed.variant.chunk_bytes >= 64 * 1024
            cut = packed.steps[packed.steps["params"]["K"] == 14336]
            assert cut["kblocks"].tolist() == [128] * 7
            assert not any(int(step["scratch"]) & SPILLED for step in cut[:-1])
            streamed = packed.segments["row_blocks"].astype(np.int64) * packed.segments["kblocks"] * 256
            assert streamed.sum() == sum(numel for numel in matrices(workload))


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_slices_of_what_fits_lie_side_by_side_and_are_announced_ahead(agree: Agree, fused: bool, slices: int) -> None:
    spec = DecoderSpec("deep", "llama", 72, 200, 2, 4, 2, 16, 50, 1e4, 1e-5, 64)
    config = ScheduleConfig(
        tiling={"gemv": {"N_tile": 16}, "attention": {"kv_block": 16}, "hand_off": {"data": 1, "slices": slices}},
        fusion_grouping=(("mlp_norm", "gate_proj", "up_proj", "silu_mul"), ("down_proj", "mlp_add")) if fused else (),
        page_allocation="none",
    )
    few = replace(TARGETS["h100"], name="few", num_sms=3, note="")
    program = lower(decode_step(spec, 48, BF16), config, few)
    packed = pack(program)
    downs = [number for number, step in enumerate(packed.steps) if step["params"]["K"] == 200]
    cut = [packed.steps[number] for number in downs]
    each = 32 * -(-200 // (32 * slices))
    assert [int(step["kblocks"]) * 16 for step in cut[: -(-200 // each)]] == [
        *[each] * (200 // each), *([-(-(200 % each) // 16) * 16] if 200 % each else [])
    ]  # fmt: skip
    assert all(bool(step["flags"] & StepFlag.STAGED_AHEAD) == bool(step["flags"] & StepFlag.CARRIES) for step in cut)
    assert packed.variant.staged_bytes == MIN_STAGED_BYTES + SLICE_SUMS_BYTES
    agree(program, 17)


def test_what_several_products_multiply_is_not_cut_to_be_early(agree: Agree) -> None:
    """Gate and up of one recipe: the second one would have to stage anew what the first has staged."""
    spec = DecoderSpec("wide", "llama", 128, 96, 1, 2, 1, 64, 50, 1e4, 1e-5, 64)
    config = ScheduleConfig(
        {"hand_off": {"data": 1, "slices": 2}}, (("gate_proj", "up_proj", "silu_mul"),), page_allocation="none"
    )
    few = replace(TARGETS["h100"], name="few", num_sms=3, note="")
    program = lower(decode_step(spec, 48, BF16), config, few)
    packed = pack(program)
    gates = {number for number, task in enumerate(program.tasks) if "gate_proj" in task.label}
    firsts = {int(each["first_step"]) for each in packed.instructions if int(each["task"]) in gates}
    for first in firsts:
        assert not any(packed.steps[first + place]["flags"] & StepFlag.CARRIES for place in (0, 1))
    assert any(step["flags"] & StepFlag.STAGED_AHEAD for step in packed.steps)
    agree(program, 17)


@pytest.mark.parametrize(("pages", "most", "cut"), [("none", 16, True), ("graph_color", 16, False), ("none", 1, False)])
def test_nothing_is_cut_to_be_early_where_that_gains_nothing_or_takes_too_many_steps(
    monkeypatch: pytest.MonkeyPatch, pages: str, most: int, cut: bool
) -> None:
    """With shared pages everything is handed over by counters."""
    monkeypatch.setattr("flywheel.vm.pack.template.MAX_STEPS", most)
    spec = DecoderSpec("deep", "llama", 72, 200, 1, 4, 2, 16, 50, 1e4, 1e-5, 64)
    config = ScheduleConfig({"hand_off": {"data": 1, "slices": 2}}, page_allocation=pages)
    few = replace(TARGETS["h100"], name="few", num_sms=3, note="")
    assert bool(slices_of(lower(decode_step(spec, 48, BF16), config, few))) is cut


@pytest.mark.parametrize(("asked", "why"), [
    ({"data": 1, "slices": 5}, "slices=5 is not in 1..4"), ({"data": 1, "slices": 0}, "slices=0 is not in 1..4"),
    ({"slices": 2}, "slices=2 without data=1"),
])  # fmt: skip
def test_slices_that_cannot_be_are_named(asked: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        lower(decode_step(CATALOG["smollm2-135m"], 64, BF16), ScheduleConfig({"hand_off": asked}), TARGETS["h100"])
