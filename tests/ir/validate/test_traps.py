"""Programs that other validators of this format are known to accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from work import lines_run

from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    Task,
    Wait,
    simulate_adversarial,
    validate,
)
from flywheel.ir.recipe import recipe_from_dict

_K = InstructionKind


def program(tasks: Sequence[Task], buffers: Sequence[Buffer] = ()) -> MegakernelProgram:
    counters = sorted({task.out_counter for task in tasks})
    return MegakernelProgram(
        target=TARGETS["h100"], buffers=buffers, counters=[Counter(number) for number in counters], tasks=tasks
    )


def codes(tested: MegakernelProgram) -> set[str]:
    return {finding.code for finding in validate(tested).errors}


def nop(number: int, waits: tuple[int, ...], sm: int | None, counter: int | None = None) -> Task:
    signal = number if counter is None else counter
    return Task(number, _K.NOP, (), (), signal, tuple(Wait(c, 1) for c in waits), {}, sm)


NEW = Buffer(0, "new", BufferKind.IO_INPUT, DType.F32, (1, 1, 4))
CACHE = Buffer(1, "cache", BufferKind.KV_CACHE, DType.F32, (8, 1, 4))
OUT = Buffer(2, "out", BufferKind.IO_OUTPUT, DType.F32, (1, 4))
ATTEND = {"head_dim": 4, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0, "kv_len": 8, "scale": 0.5}


def append(number: int, waits: tuple[Wait, ...] = (), pos: int = 7, sm: int | None = None) -> Task:
    return Task(number, _K.KV_APPEND, (0, 1), (1,), number, waits, {"pos": pos}, sm)


def attend(number: int, waits: tuple[Wait, ...], sm: int | None = None) -> Task:
    return Task(number, _K.ATTENTION_TILE, (0, 1, 1), (2,), number, waits, ATTEND, sm)


def test_kv_read_before_append_is_rejected() -> None:
    buffers = (NEW, CACHE, OUT)
    assert codes(program([append(0), attend(1, (Wait(0, 1),))], buffers)) == set()
    assert codes(program([append(0), attend(1, ())], buffers)) == {"race-read"}
    assert codes(program([attend(0, ()), append(1, (Wait(0, 1),))], buffers)) == {"race-read"}


def past(params: dict[str, int], inputs: tuple[int, ...] = (0, 1, 1)) -> Task:
    """Attention to the past alone, in no order with anything."""
    return Task(1, _K.ATTENTION_TILE, inputs, (2,), 1, (), {**ATTEND, "kv_len": 7, "pos": 7, "kv_rows": 1, **params})


def test_rows_before_an_append_may_be_read_beside_it() -> None:
    buffers = (NEW, CACHE, OUT)
    assert codes(program([append(0), past({})], buffers)) == set()
    assert codes(program([append(0), past({"kv_start": 3, "kv_len": 4})], buffers)) == set()
    assert codes(program([append(0, pos=6), past({"kv_len": 6})], buffers)) == set()
    # Without `kv_rows` the window grows into the new row as the program moves.
    plain = {name: value for name, value in past({}).params.items() if name != "kv_rows"}
    assert codes(program([append(0), replace(past({}), params=plain)], buffers)) == {"race-read"}


def test_what_may_reach_the_appended_rows_is_no_read_of_the_past() -> None:
    buffers = (NEW, CACHE, OUT)
    assert codes(program([append(0, pos=6), past({})], buffers)) == {"race-read"}
    assert codes(program([append(0), past({"kv_len": 8})], buffers)) == {"bad-param"}
    wide = (NEW, CACHE, replace(OUT, shape=(8, 4)))
    assert codes(program([append(0), past({"n_heads": 8}, inputs=(1, 1, 1))], wide)) == {"race-read"}
    written = {"op": "COPY", "args": [{"in": 0}], "out": "final", "params": {}, "out_shape": [4], "out_dtype": "F32"}
    for recipe in ({"steps": [{**written, "out_shape": [8, 1, 4], "args": [{"in": 1}]}]},):
        whole = Task(0, _K.FUSED, (0, 1), (1,), 0, (), {"pos": 7, "recipe": recipe_from_dict(recipe)})
        assert codes(program([whole, past({})], buffers)) == {"race-read"}


def test_a_new_window_is_the_row_at_pos() -> None:
    buffers = (NEW, CACHE, OUT)
    row = {"kv_rows": 2, "kv_start": 7, "kv_len": 1}
    assert codes(program([past(row)], buffers)) == set()
    assert codes(program([append(0), past(row)], buffers)) == {"race-read"}
    for broken in ({"kv_start": 6}, {"kv_len": 2}, {"kv_len": 0}, {"kv_rows": 3}, {"kv_rows": 0}, {"kv_rows": "2"}):
        assert codes(program([past({**row, **broken})], buffers)) == {"bad-param"}


def test_reading_a_cache_that_this_step_does_not_write_is_accepted() -> None:
    assert codes(program([attend(0, ())], (NEW, CACHE, OUT))) == set()


def test_unordered_kv_writers_are_rejected_and_ordered_ones_accepted() -> None:
    buffers = (NEW, CACHE, OUT)
    both = (Wait(0, 1), Wait(1, 1))
    assert codes(program([append(0, pos=6), append(1), attend(2, both)], buffers)) == {"race-write"}
    ordered = [append(0, pos=6), append(1, (Wait(0, 1),)), attend(2, (Wait(1, 1),))]
    assert codes(program(ordered, buffers)) == set()


def test_a_read_ordered_only_by_the_queue_of_its_sm_is_rejected() -> None:
    buffers = (NEW, CACHE, OUT)
    assert codes(program([append(0, sm=3), attend(1, (), sm=3)], buffers)) == {"race-read"}


def test_a_transitive_deadlock_on_one_sm_is_rejected() -> None:
    first, far, last = nop(0, (), 0), nop(1, (0,), 1), nop(2, (1,), 0)
    assert codes(program([first, far, last])) == set()
    assert codes(program([last, far, first])) == {"queue-deadlock"}


def test_a_ring_across_sms_is_rejected() -> None:
    for size in (2, 3, 17):
        blocked = [nop(sm, (size + (sm + 1) % size,), sm) for sm in range(size)]
        signals = [nop(size + sm, (), sm) for sm in range(size)]
        assert codes(program([*signals, *blocked])) == set()
        assert codes(program([*blocked, *signals])) == {"queue-deadlock"}


def test_queues_of_unassigned_tasks_never_block() -> None:
    assert codes(program([nop(2, (1,), None), nop(1, (0,), None), nop(0, (), None)])) == set()


def test_a_partial_wait_is_rejected_and_a_full_one_accepted() -> None:
    pair = [nop(0, (), None, 9), nop(1, (), None, 9)]
    consumer = nop(2, (), None)
    for threshold, expected in ((2, set()), (1, {"partial-join"}), (3, {"unsatisfiable-wait"})):
        assert codes(program([*pair, replace(consumer, waits=(Wait(9, threshold),))])) == expected


def stages(count: int, width: int, astray: int | None = None) -> MegakernelProgram:
    """`count` joined stages of `width` tiles; the first tile of stage `astray` signals a counter that nobody awaits."""
    shape, weight = (1, 4 * width), Buffer(0, "w", BufferKind.WEIGHT, DType.F32, (4 * width, 4 * width))
    buffers = [weight, Buffer(1, "x", BufferKind.IO_INPUT, DType.F32, shape)]
    buffers += [Buffer(2 + stage, f"s{stage}", BufferKind.ACTIVATION, DType.F32, shape) for stage in range(count)]
    tasks: list[Task] = []
    waits: tuple[Wait, ...] = ()
    tiles: list[dict[str, Any]] = [{"K": 4 * width, "N_tile": 4, "n_off": 4 * i} for i in range(width)]
    for stage in range(count):
        for place, params in enumerate(tiles):
            lost = stage == astray and place == 0
            task = Task(
                len(tasks), _K.GEMV_TILE, (1 + stage, 0), (2 + stage,), count if lost else stage, waits, params, place
            )
            tasks.append(task)
        waits = (Wait(stage, width - (stage == astray)),)
    return program(tasks, buffers)


@pytest.mark.parametrize("stage", [0, 57, 98])
def test_one_race_among_twelve_thousand_tasks_is_found(stage: int) -> None:
    assert codes(stages(100, 120)) == set()
    result = validate(stages(100, 120, stage))
    assert {finding.code for finding in result.errors} == {"race-read"}
    assert all(f"not ordered after task {120 * stage} " in finding.message for finding in result.errors)


def test_a_race_planted_in_a_wide_program_shows_in_a_simulation() -> None:
    assert simulate_adversarial(stages(12, 40)) == []
    assert simulate_adversarial(stages(12, 40, 5))


def test_tiles_that_skip_a_stage_are_ordered_through_it() -> None:
    skipping = stages(6, 4)
    tasks = [replace(t, inputs=(2, 0)) if t.inputs[0] == 6 else t for t in skipping.tasks]
    assert codes(replace(skipping, tasks=tasks)) == set()


def test_one_row_and_several_rows_of_one_buffer_do_not_pass_for_disjoint_tiles() -> None:
    weight = Buffer(0, "w", BufferKind.WEIGHT, DType.F32, (8, 8))
    rows = Buffer(1, "rows", BufferKind.IO_INPUT, DType.F32, (2, 8))
    row = Buffer(2, "row", BufferKind.IO_INPUT, DType.F32, (1, 8))
    out = Buffer(3, "out", BufferKind.IO_OUTPUT, DType.F32, (2, 8))

    def gemm(number: int, x: int, start: int, width: int) -> Task:
        params = {"M_tile": 2 if x == 1 else 1, "K": 8, "N_tile": width, "n_off": start}
        return Task(number, _K.GEMM_TILE, (x, 0), (3,), number, (), params)

    buffers = (weight, rows, row, out)
    assert codes(program([gemm(0, 1, 0, 4), gemm(1, 1, 4, 4)], buffers)) == set()
    # Columns 4..8 of the first row are elements 4..8, which the second row's view shares.
    step = {"op": "COPY", "args": [{"in": 0}], "out": "final", "out_shape": [1, 4], "out_dtype": "F32"}
    recipe = recipe_from_dict({"steps": [step]})
    flat = Task(1, _K.FUSED, (2,), (3,), 1, (), {"n_off": 4, "N_tile": 4, "recipe": recipe})
    assert codes(program([gemm(0, 1, 0, 4), flat], buffers)) == {"race-write"}


def test_work_on_one_buffer_in_place_is_accepted_when_tiles_keep_to_their_columns() -> None:
    step = {"op": "COPY", "args": [{"in": 0}], "out": 0, "out_shape": [1, 4], "out_dtype": "F32"}
    double = {"op": "ADD", "args": [{"s": 0}, {"s": 0}], "out": "final", "out_shape": [1, 4], "out_dtype": "F32"}
    recipe = recipe_from_dict({"steps": [step, double]})
    source = Buffer(0, "source", BufferKind.IO_INPUT, DType.F32, (1, 16))
    x = Buffer(1, "x", BufferKind.IO_OUTPUT, DType.F32, (1, 16))
    fill = Task(9, _K.COPY, (0,), (1,), 9)
    tiles = [
        Task(i, _K.FUSED, (1,), (1,), i, (Wait(9, 1),), {"n_off": 4 * i, "N_tile": 4, "recipe": recipe})
        for i in range(4)
    ]
    assert codes(program([fill, *tiles], (source, x))) == set()
    steps = [{**step, "op": "GELU", "out_shape": [1, 16]}, {**step, "args": [{"s": 0}], "out": "final"}]
    whole = recipe_from_dict({"steps": steps})
    greedy = replace(tiles[0], params={**tiles[0].params, "recipe": whole})
    assert codes(program([fill, greedy, *tiles[1:]], (source, x))) == {"race-read"}


def test_reading_columns_before_this_very_task_writes_them_is_rejected_when_strict() -> None:
    step = {"op": "COPY", "args": [{"in": 0}], "out": "final", "out_shape": [1, 8], "out_dtype": "F32"}
    source = Buffer(0, "source", BufferKind.WEIGHT, DType.F32, (16, 8))
    x = Buffer(1, "x", BufferKind.IO_OUTPUT, DType.F32, (1, 16))
    row = Buffer(2, "row", BufferKind.IO_INPUT, DType.F32, (1, 8))
    half = Task(0, _K.GEMV_TILE, (2, 0), (1,), 0, (), {"K": 8, "n_off": 0, "N_tile": 8})
    recipe = recipe_from_dict({"steps": [step]})
    other = Task(1, _K.FUSED, (1,), (1,), 1, (Wait(0, 1),), {"n_off": 8, "N_tile": 8, "recipe": recipe})
    result = validate(program([half, other], (source, x, row)), strict=True)
    assert {finding.code for finding in result.errors} == {"partial-write"}


def test_wide_overlaps_and_long_chains_do_work_that_grows_with_the_tasks() -> None:
    source = Buffer(0, "source", BufferKind.IO_INPUT, DType.F32, (1, 4))
    x = Buffer(1, "x", BufferKind.ACTIVATION, DType.F32, (1, 4))

    def chained(count: int) -> tuple[MegakernelProgram, MegakernelProgram]:
        """A chain of writers with two loose ones at its end, and a chain that its queue holds from its end on."""
        chain = [Task(i, _K.COPY, (0,), (1,), i, (Wait(i - 1, 1),) if i else ()) for i in range(count)]
        loose = [Task(count + i, _K.COPY, (0,), (1,), count + i, (Wait(count - 1, 1),)) for i in range(2)]
        return program([*chain, *loose], (source, x)), program(chain[::-1], (source, x))

    long, short = chained(4000), chained(1000)
    assert [codes(each) for each in long] == [{"race-write"}, set()]
    for more, less in zip(long, short, strict=True):
        assert lines_run(lambda more=more: codes(more)) < 4.5 * lines_run(lambda less=less: codes(less))
