from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from spelled import spelled_steps

from flywheel.ir.compressed import Run, Runs, Tile, tiles_of
from flywheel.ir.dtype import BufferKind, DType
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.target import TARGETS
from flywheel.measure.floor import floor_fraction, floor_us, weight_bytes_read

K, B = InstructionKind, BufferKind
VOCAB, HIDDEN = 100, 16
IDS, TABLE, X, NORM, HEAD, LOGITS, UNUSED = range(7)
BUFFERS = (
    Buffer(IDS, "ids", B.IO_INPUT, DType.I32, (2,)),
    Buffer(TABLE, "embed", B.WEIGHT, DType.BF16, (VOCAB, HIDDEN)),
    Buffer(X, "x", B.ACTIVATION, DType.BF16, (2, HIDDEN)),
    Buffer(NORM, "norm", B.WEIGHT, DType.F32, (HIDDEN,)),
    Buffer(HEAD, "head", B.WEIGHT, DType.BF16, (VOCAB, HIDDEN)),
    Buffer(LOGITS, "logits", B.IO_OUTPUT, DType.F32, (2, VOCAB)),
    Buffer(UNUSED, "unused", B.WEIGHT, DType.BF16, (1000, 1000)),
)
WHOLE, ROW, NORM_BYTES = VOCAB * HIDDEN * 2, HIDDEN * 2, HIDDEN * 4


def program(*tasks: tuple[InstructionKind, list[int]], recipe: Sequence[Mapping[str, object]] | None = None) -> int:
    built = [
        Task(i, op, inputs, [X], i, params={"recipe": spelled_steps(recipe)} if op is K.FUSED else {})
        for i, (op, inputs) in enumerate(tasks)
    ]
    return weight_bytes_read(MegakernelProgram(buffers=BUFFERS, tasks=built))


def test_an_untied_table_costs_a_row_per_id_and_the_head_is_read_whole_once() -> None:
    tiles = [(K.GEMV_TILE, [X, HEAD])] * 4
    assert program((K.EMBED, [IDS, TABLE]), (K.RMSNORM, [X, NORM]), *tiles) == 2 * ROW + NORM_BYTES + WHOLE


def test_a_tied_table_counts_once_whole() -> None:
    assert program((K.EMBED, [IDS, TABLE]), (K.GEMV_TILE, [X, TABLE])) == WHOLE
    assert program((K.GEMV_TILE, [X, TABLE]), (K.EMBED, [IDS, TABLE])) == WHOLE


def test_the_same_ids_gathered_by_several_tasks_count_once() -> None:
    assert program((K.EMBED, [IDS, TABLE]), (K.EMBED, [IDS, TABLE])) == 2 * ROW


def test_two_sets_of_ids_count_apart_but_never_beyond_the_table() -> None:
    assert program((K.EMBED, [IDS, TABLE]), (K.EMBED, [X, TABLE])) == (2 + 2 * HIDDEN) * ROW
    assert program((K.EMBED, [IDS, TABLE]), *[(K.EMBED, [X, TABLE]), (K.EMBED, [LOGITS, TABLE])]) == WHOLE


def test_a_weight_that_no_task_reads_costs_nothing() -> None:
    assert program((K.RMSNORM, [X, NORM])) == NORM_BYTES


def test_a_recipe_that_only_gathers_from_the_table_costs_rows() -> None:
    recipe = [
        {"op": "EMBED", "args": [{"in": 0}, {"in": 1}], "out": 0},
        {"op": "RMSNORM", "args": [{"s": 0}, {"in": 2}], "out": "final"},
    ]
    assert program((K.FUSED, [IDS, TABLE, NORM]), recipe=recipe) == 2 * ROW + NORM_BYTES


def test_a_recipe_that_multiplies_by_the_table_reads_it_whole() -> None:
    recipe = [
        {"op": "EMBED", "args": [{"in": 0}, {"in": 1}], "out": 0},
        {"op": "GEMV_TILE", "args": [{"s": 0}, {"in": 1}], "out": "final"},
    ]
    assert program((K.FUSED, [IDS, TABLE]), recipe=recipe) == WHOLE


def test_ids_made_on_chip_cost_a_row_each() -> None:
    recipe = [
        {"op": "SAMPLE_ARGMAX", "args": [{"in": 0}], "out": 7, "out_shape": [3]},  # a name, not the step's place
        {"op": "EMBED", "args": [{"s": 7}, {"in": 1}], "out": "final"},
    ]
    assert program((K.FUSED, [LOGITS, TABLE]), recipe=recipe) == 3 * ROW


def test_each_tile_of_a_run_that_makes_its_own_ids_counts() -> None:
    recipe = spelled_steps([
        {"op": "SAMPLE_ARGMAX", "args": [{"in": 0}], "out": 0, "out_shape": [3]},
        {"op": "EMBED", "args": [{"s": 0}, {"in": 1}], "out": "final"},
    ])
    run = Run(K.FUSED, (LOGITS, TABLE), (X,), 0, (), "gather", tiles_of([Tile({"recipe": recipe}, 0, 0)] * 2))
    assert weight_bytes_read(MegakernelProgram(buffers=BUFFERS, tasks=Runs([run], [0, 1]))) == 6 * ROW


def test_the_floor_is_bytes_over_bandwidth_and_its_fraction_is_one_at_the_floor() -> None:
    # llama3-8b reads 15.009 GB a token; an H100's datasheet says 3350 GB/s.
    floor = floor_us(15_009_000_000, TARGETS["h100"])
    assert floor == pytest.approx(4480.3, abs=0.1)
    assert floor_fraction(floor, floor) == 1.0
    assert floor_fraction(floor, 2 * floor) == 0.5
