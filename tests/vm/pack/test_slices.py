"""Products whose operand is longer than the staging area: cut into slices of K, they mean the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import TARGETS, BufferKind, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan.step import Epilogue
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.vm.abi import InstructionFlag, SegmentFlag
from flywheel.vm.pack import pack

IN, ACT, WEIGHT, OUT = BufferKind.IO_INPUT, BufferKind.ACTIVATION, BufferKind.WEIGHT, BufferKind.IO_OUTPUT
F32, BF16 = DType.F32, DType.BF16
Chain = Callable[..., MegakernelProgram]
Agree = Callable[..., None]
SLICED = SegmentFlag.CONTINUES | SegmentFlag.GOES_ON
Limit = Callable[[DType, int, int], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """`limit(dtype, rows, fragments)`: a slice of so many rows has at most so many fragments."""

    def lower_to(dtype: DType, rows: int, fragments: int) -> None:
        nbytes = dtype.nbytes(rows * (fragments + (rows > 1)) * 16)
        for name in ("MAX_STAGED_BYTES", "MAX_INPUT_ROWS_BYTES", "MAX_STAGED_ROWS_BYTES"):
            monkeypatch.setattr(f"flywheel.plan.staging.{name}", nbytes)

    return lower_to


def slices_of(program: MegakernelProgram) -> list[int]:
    """Fragments of each slice of all segments that are cut."""
    segments = pack(program).segments
    return [int(kblocks) for kblocks in segments["kblocks"][segments["flags"] & SLICED != 0]]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("fragments", [6, 14])
@pytest.mark.parametrize("depth", [520, 531, 1024])
@pytest.mark.parametrize("threads", [128, 320])
def test_slices_add_up_whatever_the_tiles(
    chain: Chain, check_vm: Agree, limit: Limit, dtype: DType, rows: int, fragments: int, depth: int, threads: int
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
    passes = int((packed.segments["flags"] & SegmentFlag.GOES_ON == 0).sum())
    assert len(packed.steps) <= len(tasks) <= passes and sum(cut) == passes * -(-depth // 16)
    assert max(cut) <= fragments and len(cut) == len(packed.segments)
    assert not (packed.instructions["flags"] & InstructionFlag.X_STAGED).any()
    assert (packed.segments["flags"] & SegmentFlag.FRESH_X).all()
    check_vm(program)


@pytest.mark.parametrize(
    ("weights", "knobs", "down", "gate"),
    [
        ("int4", {"fuse.qkv": 1, "fuse.mlp_in": 2}, 256, 256),  # norms make whole operands, of 64 KiB
        ("int4", {"fuse.qkv": 1, "fuse.mlp_in": 1}, 256, 128),  # what gate makes waits in the area for up
        ("int4", {"fuse.qkv": 0, "fuse.mlp_in": 1}, 128, 128),
        (None, {"fuse.qkv": 1, "fuse.mlp_in": 2}, 128, 256),
    ],
)
def test_slices_of_quantised_products_take_the_area_that_another_operand_needs(
    weights: str | None, knobs: dict[str, int], down: int, gate: int
) -> None:
    spec = replace(CATALOG["qwen3-8b"], n_layers=1)
    workload = Workload("qwen3-8b", spec, TARGETS["h200"], "bf16", 512, 8, weights)
    space = make_space(workload)
    config = space.to_config({**space.known_good()[0], "fuse.down": 1, "fuse.head": 0, **knobs})
    packed = pack(lower(workload.graph, config, workload.target))
    steps = [(packed.steps[index], packed.program.tasks[int(each["task"])].label) for each in packed.instructions
             for index in range(int(each["first_step"]), int(each["first_step"]) + int(each["n_steps"]))]  # fmt: skip
    blocks = {
        name: {int(step["as"]["product"]["kblocks"]) for step, label in steps if step["params"]["K"] and name in label}
        for name in ("down_proj", "gate_proj")
    }
    assert blocks == {"down_proj": {down}, "gate_proj": {gate}}


def test_slices_are_segments_that_take_each_other_s_place(chain: Chain, limit: Limit) -> None:
    limit(BF16, 1, 30)
    buffers = {"x": (IN, BF16, (1, 1024)), "w": (WEIGHT, BF16, (20, 1024)), "y": (OUT, BF16, (1, 20))}
    packed = pack(chain(buffers, [("GEMV_TILE", ["x", "w"], ["y"], {"K": 1024, "n_off": 0, "N_tile": 20})]))
    (step,) = packed.steps
    assert step["as"]["product"][["kblocks", "row_chunks"]].tolist() == (22, packed.variant.matrix_warps)
    fresh, continues, goes_on = SegmentFlag.FRESH_X, SegmentFlag.CONTINUES, SegmentFlag.GOES_ON
    assert packed.segments["flags"].tolist() == [fresh | goes_on, fresh | continues | goes_on, fresh | continues]
    assert packed.segments["kblocks"].tolist() == [22, 22, 20]
    assert packed.segments["src"].tolist() == [0, 22 * 512, 44 * 512]
    assert set(packed.segments["row_stride"].tolist()) == {64 * 512}


@pytest.mark.parametrize(("rows", "depth", "merged"), [(8, 1024, True), (8, 1040, False), (1, 1024, False)])
def test_even_slices_of_rows_of_one_block_are_one_segment(
    chain: Chain, check_vm: Agree, limit: Limit, rows: int, depth: int, merged: bool
) -> None:
    limit(BF16, rows, 16)
    buffers = {"x": (IN, BF16, (rows, depth)), "w": (WEIGHT, BF16, (40, depth)), "y": (OUT, BF16, (rows, 40))}
    tile = {"K": depth, "M_tile": rows}
    spans = (0, 16), (16, 24)
    tasks = [("GEMM_TILE", ["x", "w"], ["y"], {**tile, "n_off": start, "N_tile": size}) for start, size in spans]
    program = chain(buffers, tasks, ScheduleConfig(tiling={"stream": {"chunk_bytes": 4096}}))
    segments = pack(program).segments
    narrow = segments[segments["row_blocks"] == 1]
    assert (narrow["slice_chunks"] > 0).all() == merged and (len(narrow) == 1) == merged
    assert (segments["slice_chunks"][segments["row_blocks"] == 2] == 0).all()
    check_vm(program)


def made(op: str, args: list[dict[str, int]], out: Any, shape: tuple[int, int], **params: Any) -> dict[str, Any]:
    return {"op": op, "args": args, "out": out, "params": params, "out_shape": [*shape], "out_dtype": "BF16"}


@pytest.mark.parametrize("rows", [1, 8])
def test_residuals_and_gates_are_taken_in_behind_the_last_slice(
    chain: Chain, check_vm: Agree, limit: Limit, rows: int
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
    cut = [product for product in steps["as"]["product"] if product["kblocks"] * 16 < depth]
    epilogues = {Epilogue(int(product["epilogue"])) for product in cut}
    assert {Epilogue.ADD, Epilogue.SILU_MUL} <= epilogues
    check_vm(program)


def test_a_task_that_writes_what_it_multiplies_in_slices_is_refused(chain: Chain, limit: Limit) -> None:
    """A later pass would stage what an earlier one has made."""
    limit(BF16, 2, 3)
    buffers = {"x": (ACT, BF16, (2, 200)), "w": (WEIGHT, BF16, (200, 200))}
    program = chain(buffers, [("GEMM_TILE", ["x", "w"], ["x"], {"K": 200, "n_off": 0, "N_tile": 200, "M_tile": 2})])
    with pytest.raises(InvalidProgramError, match=r"task 0 .* writes its operand of 800 bytes, which it multiplies in"):
        pack(program)


@pytest.mark.parametrize("data", [0, 1])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_decoder_whose_mlp_outgrows_the_area_is_what_it_was(
    check_vm: Agree, limit: Limit, data: int, fused: bool, batch: int
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
    check_vm(program, 17)


def matrices(workload: Workload) -> list[int]:
    """Elements of each matrix that one layer and the head multiply by."""
    blocks = workload.graph.blocks
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
            assert set(cut["as"]["product"]["kblocks"].tolist()) == {128}
            streamed = packed.segments["row_blocks"].astype(np.int64) * packed.segments["kblocks"] * 256
            assert streamed.sum() == sum(numel for numel in matrices(workload))


def test_a_product_that_would_begin_with_a_part_of_its_input_is_refused_by_a_line() -> None:
    graph = decode_step(CATALOG["smollm2-135m"], 64, BF16)
    whole, cut = (ScheduleConfig({"hand_off": {"data": 1, "slices": slices}}) for slices in (1, 2))
    assert not slices_of(lower(graph, whole, TARGETS["h100"]))
    with pytest.raises(ConfigError, match=r"^tiling\.hand_off\.slices=2: no product begins with .*; leave it out$"):
        lower(graph, cut, TARGETS["h100"])
