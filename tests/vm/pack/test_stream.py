"""What is streamed, in which order, and which operands are staged once for several tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flywheel.ir import TARGETS, BufferKind, DType, MegakernelProgram, ScheduleConfig, Task
from flywheel.ir.operations import PRODUCTS
from flywheel.ir.recipe import Input, recipe_steps
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.vm.abi import InstructionFlag, SegmentFlag
from flywheel.vm.pack import PackedProgram, pack

FEW = replace(TARGETS["h100"], name="few", num_sms=3, note="")
SPEC = DecoderSpec("odd", "qwen3", 72, 104, 2, 4, 2, 16, 50, 1e4, 1e-6, 64, qkv_bias=True)
MLP = ("mlp_norm", "gate_proj", "up_proj", "silu_mul")
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("o_proj", "attn_add"), MLP, ("down_proj", "mlp_add"),
    ("final_norm", "lm_head"),
)  # fmt: skip
IN, WEIGHT, ACT, OUT = BufferKind.IO_INPUT, BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.IO_OUTPUT
F32 = DType.F32
Chain = Callable[..., MegakernelProgram]
Fragment = tuple[int, int, int]  # buffer row, row block, fragment along K


def needed(task: Task) -> Counter[Fragment]:
    """Fragments that a task multiplies, by the format alone."""
    params = task.params
    products = [(Input(1), params)] if task.op in PRODUCTS else [
        (step.args[1], {**params, **step.params}) for step in recipe_steps(task) if step.op in PRODUCTS]  # fmt: skip
    fragments: Counter[Fragment] = Counter()
    for weight, own in products:
        first, last = own["n_off"] // 16, (own["n_off"] + own["N_tile"] - 1) // 16
        for block in range(first, last + 1):
            fragments.update((task.inputs[weight.number], block, k) for k in range(-(-own["K"] // 16)))
    return fragments


def walked(packed: PackedProgram, sm: int) -> list[list[Fragment]]:
    """Fragments of each instruction of an SM, in the order in which its loader reads them."""
    fragment = 256 * packed.dtype.bits // 8
    fragments: list[list[Fragment]] = [[] for _ in range(packed.queues[sm + 1] - packed.queues[sm])]
    place = 0
    for index in range(packed.streams[sm], packed.streams[sm + 1]):
        segment, row = packed.segments[index], int(packed.segment_buffers[index])
        assert segment["queue_index"] >= place
        place = int(segment["queue_index"])
        along = -(-int(packed.buffers["shape"][row, 1]) // 16)
        for block in range(segment["row_blocks"]):
            for chunk in range(segment["row_chunks"]):
                first = chunk * segment["chunk_kblocks"]
                for k in range(first, min(first + segment["chunk_kblocks"], segment["kblocks"])):
                    at = int(segment["src"]) + block * int(segment["row_stride"]) + int(k) * fragment
                    assert at % fragment == 0
                    fragments[place].append((row, at // fragment // along, at // fragment % along))
    return fragments


@pytest.mark.parametrize("grouping", [(), FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("rows", [16, 48, 112])
@pytest.mark.parametrize("threads", [128, 1024])
def test_every_weight_is_streamed_once_and_in_order(
    grouping: tuple[tuple[str, ...], ...], dtype: DType, rows: int, threads: int
) -> None:
    config = ScheduleConfig(
        tiling={"gemv": {"N_tile": rows}, "stream": {"chunk_bytes": 1024}},
        fusion_grouping=grouping,
        threads_per_block=threads,
    )
    program = lower(decode_step(SPEC, 48, dtype), config, FEW)
    packed = pack(program)
    for sm in range(FEW.num_sms):
        queue = [task for task in program.tasks if task.sm == sm]
        for task, fragments in zip(queue, walked(packed, sm), strict=True):
            assert Counter(fragments) == needed(task)
            runs = [row for i, (row, _, _) in enumerate(fragments) if not i or fragments[i - 1][0] != row]
            assert len(runs) == len(set(runs))
            for row in runs:
                mine = [(block, k) for other, block, k in fragments if other == row]
                assert mine == sorted(mine)


def test_passes_hold_what_the_partials_hold() -> None:
    config = ScheduleConfig(tiling={"gemv": {"N_tile": 112}}, threads_per_block=1024)
    packed = pack(lower(decode_step(SPEC, 48, F32), config, FEW))
    assert packed.pass_blocks == 4
    assert packed.segments["row_blocks"].max() == 4


def test_rows_between_fragments_are_streamed_with_their_neighbours(chain: Chain) -> None:
    buffers = {"x": (IN, F32, (1, 40)), "w": (WEIGHT, F32, (60, 40)), "y": (OUT, F32, (1, 60))}
    spans = ((0, 15), (15, 2), (17, 43))
    tasks = [("GEMV_TILE", ["x", "w"], ["y"], {"K": 40, "n_off": start, "N_tile": size}) for start, size in spans]
    packed = pack(chain(buffers, tasks))
    assert packed.segments["src"].tolist() == [0, 0, 3 * 1024]
    assert packed.segments["row_blocks"].tolist() == [1, 2, 3]


def marks(program: MegakernelProgram) -> list[bool]:
    """Of each instruction in queue order, whether it finds its operand staged."""
    packed = pack(program)
    found = [bool(flags & InstructionFlag.X_STAGED) for flags in packed.instructions["flags"]]
    for number, segments in enumerate(np.split(packed.segments, packed.streams[1:-1])):
        first = packed.queues[number]
        for place in {int(place) for place in segments["queue_index"]}:
            mine = segments[segments["queue_index"] == place]
            assert bool(mine["flags"][0] & SegmentFlag.FRESH_X) is not found[first + place]
            assert not (mine["flags"][1:] & SegmentFlag.FRESH_X).any() or len({*mine["kblocks"]}) > 1
    return found


def normed(weight: int, eps: float = 1e-5, size: int = 16, **params: Any) -> dict[str, Any]:
    steps = [
        {"op": "RMSNORM", "args": [{"in": 0}, {"in": 1}], "out": 0, "params": {"eps": eps, "hidden": 48},
         "out_shape": [1, 48], "out_dtype": "F32"},
        {"op": "GEMV_TILE", "args": [{"s": 0}, {"in": weight}], "out": "final", "params": {"K": 48},
         "out_shape": [1, size], "out_dtype": "F32"},
    ]  # fmt: skip
    return {"N_tile": size, "recipe": {"steps": steps}, **params}


NORMS = {
    "x": (IN, F32, (1, 48)), "g": (WEIGHT, F32, (48,)), "v": (WEIGHT, F32, (32, 48)), "w": (WEIGHT, F32, (32, 48)),
    "y": (OUT, F32, (1, 32)), "z": (OUT, F32, (1, 32)), "x2": (IN, F32, (1, 48)),
}  # fmt: skip


def unordered(program: MegakernelProgram) -> MegakernelProgram:
    return replace(program, tasks=tuple(replace(task, waits=()) for task in program.tasks))


def test_tiles_of_several_projections_share_one_staged_norm(chain: Chain, check_vm: Callable[..., None]) -> None:
    tasks = [
        ("FUSED", ["x", "g", "v"], ["y"], normed(2, n_off=0)),
        ("FUSED", ["x", "g", "v"], ["y"], normed(2, n_off=16)),
        ("FUSED", ["x", "g", "w", "v"], ["z"], normed(2, n_off=0)),
        ("FUSED", ["x", "g", "w"], ["z"], normed(2, n_off=16)),
    ]
    program = unordered(chain(NORMS, tasks))
    assert marks(program) == [False, True, True, True]
    check_vm(program)


@pytest.mark.parametrize(
    "other",
    [
        ("FUSED", ["x2", "g", "v"], ["y"], normed(2, n_off=16)),
        ("FUSED", ["x", "g", "v"], ["y"], normed(2, eps=1e-3, n_off=16)),
        ("GEMV_TILE", ["x", "v"], ["y"], {"K": 48, "n_off": 16, "N_tile": 16}),
        ("GELU", ["x"], ["y"], {}),
    ],
    ids=["input", "param", "steps", "no matrix"],
)
def test_an_operand_that_differs_in_anything_is_staged_anew(chain: Chain, other: Any) -> None:
    first = ("FUSED", ["x", "g", "v"], ["y"], normed(2, n_off=0))
    assert marks(unordered(chain(NORMS, [first, other, first]))) == [False, False, False]


def test_different_waits_do_not_matter_since_nothing_is_written_once_read(
    chain: Chain, check_vm: Callable[..., None]
) -> None:
    tile = {"K": 48, "n_off": 0, "N_tile": 32}
    tasks = [
        ("COPY", ["x"], ["h"], {}),
        ("GEMV_TILE", ["h", "v"], ["y"], tile),
        ("GEMV_TILE", ["h", "w"], ["z"], tile),
    ]
    program = chain({**NORMS, "h": (ACT, F32, (1, 48))}, tasks)
    assert marks(program) == [False, False, True]
    check_vm(program)


def test_steps_whose_results_are_needed_later_are_not_skipped(chain: Chain, check_vm: Callable[..., None]) -> None:
    recipe = normed(2, n_off=0, size=32)
    recipe["recipe"]["steps"][1:] = [
        {"op": "GEMV_TILE", "args": [{"s": 0}, {"in": 2}], "out": 1, "params": {"K": 48}, "out_shape": [1, 32],
         "out_dtype": "F32"},
        {"op": "COPY", "args": [{"s": 0}], "out": 2, "params": {"n_off": 7, "N_tile": 32}, "out_shape": [1, 32],
         "out_dtype": "F32"},
        {"op": "ADD", "args": [{"s": 1}, {"s": 2}], "out": "final", "params": {}, "out_shape": [1, 32],
         "out_dtype": "F32"},
    ]  # fmt: skip
    tasks = [("FUSED", ["x", "g", "v"], [name], recipe) for name in ("y", "z")]
    program = unordered(chain(NORMS, tasks))
    assert marks(program) == [False, False]
    check_vm(program)


def after_the_product(op: str, arg: dict[str, int], out: Any) -> dict[str, Any]:
    return {"op": op, "args": [arg], "out": out, "params": {}, "out_shape": [1, 32], "out_dtype": "F32"}


def test_what_follows_the_last_product_leaves_its_operand_alone(chain: Chain, check_vm: Callable[..., None]) -> None:
    recipe = normed(2, n_off=0, size=32)
    recipe["recipe"]["steps"][1]["out"] = 1
    recipe["recipe"]["steps"] += [after_the_product("GELU", {"s": 1}, 2), after_the_product("GELU", {"s": 2}, "final")]
    program = unordered(chain(NORMS, [("FUSED", ["x", "g", "v"], [name], recipe) for name in ("y", "z")]))
    assert marks(program) == [False, True]
    check_vm(program)


def test_an_operand_of_the_tasks_own_columns_is_staged_anew(chain: Chain, check_vm: Callable[..., None]) -> None:
    steps = [
        {"op": "COPY", "args": [{"in": 0}], "out": 0, "params": {}, "out_shape": [1, 16], "out_dtype": "F32"},
        {"op": "GEMV_TILE", "args": [{"s": 0}, {"in": 1}], "out": "final",
         "params": {"K": 16, "n_off": 3, "N_tile": 16}, "out_shape": [1, 16], "out_dtype": "F32"},
    ]  # fmt: skip
    buffers = {"x": (IN, F32, (1, 32)), "w": (WEIGHT, F32, (20, 16)), "y": (OUT, F32, (1, 32))}
    recipe = {"steps": steps}
    tasks = [("FUSED", ["x", "w"], ["y"], {"n_off": start, "N_tile": 16, "recipe": recipe}) for start in (0, 16)]
    program = unordered(chain(buffers, tasks))
    assert marks(program) == [False, False]
    check_vm(program)
