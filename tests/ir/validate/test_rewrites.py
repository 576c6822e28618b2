"""Buffers that are written more than once: ordered rewrites are safe, everything unordered is a race."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flywheel.ir import (
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

_K, _F32 = InstructionKind, DType.F32
WIDTH = 4
X, W, B, Y, Z, CACHE = range(6)
BUFFERS = (
    Buffer(X, "x", BufferKind.IO_INPUT, _F32, (1, WIDTH)),
    Buffer(W, "w", BufferKind.WEIGHT, _F32, (WIDTH, WIDTH)),
    Buffer(B, "b", BufferKind.ACTIVATION, _F32, (1, WIDTH)),
    Buffer(Y, "y", BufferKind.IO_OUTPUT, _F32, (1, WIDTH)),
    Buffer(Z, "z", BufferKind.IO_OUTPUT, _F32, (1, WIDTH)),
    Buffer(CACHE, "cache", BufferKind.KV_CACHE, _F32, (8, 1, WIDTH)),
)
ATTEND = {"head_dim": WIDTH, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0, "kv_len": 8, "scale": 0.5}


def program(tasks: list[Task]) -> MegakernelProgram:
    used = {number for task in tasks for number in (*task.inputs, *task.outputs)}
    buffers = tuple(buffer for buffer in BUFFERS if buffer.id in used)
    return MegakernelProgram(buffers=buffers, counters=[Counter(task.id) for task in tasks], tasks=tasks)


def task(number: int, op: InstructionKind, inputs: list[int], output: int, after: list[int], **params: Any) -> Task:
    waits = tuple(Wait(earlier, 1) for earlier in after)
    return Task(number, op, inputs, (output,), number, waits, params)


def tile(number: int, after: list[int], start: int, width: int = 2) -> Task:
    return task(number, _K.GEMV_TILE, [X, W], B, after, K=WIDTH, N_tile=width, n_off=start)


def copy(number: int, after: list[int], source: int, target: int) -> Task:
    return task(number, _K.COPY, [source], target, after)


def verdict(tasks: list[Task]) -> set[str]:
    tested = program(tasks)
    result = validate(tested, strict=True)
    if result.ok:
        assert simulate_adversarial(tested, 32) == []
    return {finding.code for finding in result.errors}


def test_write_read_write_read_in_a_chain_is_accepted() -> None:
    assert verdict([copy(0, [], X, B), copy(1, [0], B, Y), copy(2, [1], X, B), copy(3, [2], B, Z)]) == set()


@pytest.mark.parametrize("listed", [[0, 2, 1, 3], [0, 1, 2, 3]])
def test_a_rewrite_that_nothing_orders_after_a_reader_is_a_race(listed: list[int]) -> None:
    tasks = [copy(0, [], X, B), copy(1, [0], B, Y), copy(2, [0], X, B), copy(3, [2], B, Z)]
    assert verdict([tasks[place] for place in listed]) == {"race-read"}
    assert simulate_adversarial(program([tasks[place] for place in listed]), 32)


def test_a_reader_of_the_second_value_that_nothing_orders_after_its_write_is_a_race() -> None:
    assert verdict([copy(0, [], X, B), copy(1, [0], B, Y), copy(2, [1], X, B), copy(3, [0], B, Z)]) == {"race-read"}


def test_a_read_before_every_write_is_a_race() -> None:
    assert verdict([copy(0, [], B, Y), copy(1, [0], X, B), copy(2, [1], B, Z)]) == {"race-read"}


def test_rewrites_in_no_order_are_a_race() -> None:
    assert verdict([copy(0, [], X, B), copy(1, [], X, B), copy(2, [0, 1], B, Y)]) == {"race-write"}


def test_a_tile_may_be_rewritten_behind_its_reader_and_not_beside_it() -> None:
    first = [tile(0, [], 0), tile(1, [], 2), copy(2, [0, 1], B, Y)]
    assert verdict([*first, tile(3, [2], 0), copy(4, [1, 3], B, Z)]) == set()
    assert verdict([*first, tile(3, [0], 0), copy(4, [1, 2, 3], B, Z)]) == {"race-read"}


def test_a_rewrite_of_other_columns_than_those_read_needs_no_order() -> None:
    step = {"op": "COPY", "args": [{"in": 0}], "out": "final", "out_shape": [1, 2], "out_dtype": "F32"}
    half: dict[str, Any] = {"N_tile": 2, "recipe": recipe_from_dict({"steps": [step]})}

    def slice_of(number: int, after: list[int], start: int) -> Task:
        return task(number, _K.FUSED, [B], Y, after, n_off=start, **half)

    tasks = [tile(0, [], 0), tile(1, [], 2), slice_of(2, [0], 0), slice_of(3, [1], 2), tile(4, [1, 3], 2)]
    assert verdict([*tasks, copy(5, [0, 4], B, Z)]) == set()
    assert verdict([*tasks[:3], slice_of(3, [1], 2), tile(4, [1], 2), copy(5, [0, 4], B, Z)]) == {"race-read"}


def test_tiles_of_another_grid_may_rewrite_a_buffer() -> None:
    first = [tile(0, [], 0), tile(1, [], 2), copy(2, [0, 1], B, Y)]
    assert verdict([*first, tile(3, [2], 1), copy(4, [3], B, Z)]) == set()
    assert verdict([*first, tile(3, [2], 1), copy(4, [2], B, Z)]) == {"race-read"}


def test_columns_that_only_a_later_task_writes_are_no_value() -> None:
    assert verdict([tile(0, [], 0), copy(1, [0], B, Y), tile(2, [1], 2), copy(3, [2], B, Z)]) == {"race-read"}


def test_a_buffer_may_be_changed_in_place_between_its_readers() -> None:
    double = task(2, _K.ADD, [B, B], B, [1])
    assert verdict([copy(0, [], X, B), copy(1, [0], B, Y), double, copy(3, [2], B, Z)]) == set()
    loose = task(2, _K.ADD, [B, B], B, [0])
    assert verdict([copy(0, [], X, B), copy(1, [0], B, Y), loose, copy(3, [2], B, Z)]) == {"race-read"}


def append(number: int, after: list[int], pos: int) -> Task:
    return task(number, _K.KV_APPEND, [X, CACHE], CACHE, after, pos=pos)


def attend(number: int, after: list[int], output: int, **params: int) -> Task:
    return task(number, _K.ATTENTION_TILE, [X, CACHE, CACHE], output, after, **{**ATTEND, **params})


def test_a_cache_may_be_appended_to_again_behind_its_reader() -> None:
    assert verdict([append(0, [], 6), attend(1, [0], Y), append(2, [1], 7), attend(3, [2], Z)]) == set()
    assert verdict([append(0, [], 6), attend(1, [0], Y), append(2, [0], 7), attend(3, [2], Z)]) == {"race-read"}


def test_the_past_is_read_beside_appends_behind_it_and_in_order_with_others() -> None:
    past = {"kv_len": 6, "pos": 7, "kv_rows": 1}
    assert verdict([append(0, [], 2), attend(1, [0], Y, **past), append(2, [0], 7)]) == set()
    assert verdict([append(0, [], 2), attend(1, [], Y, **past), append(2, [0], 7)]) == {"race-read"}


def drawn(dice: random.Random) -> list[tuple[Task, frozenset[int], frozenset[int]]]:
    """Tasks on one buffer with the columns that each reads and writes of it: a reader, a tile or both."""
    bodies: list[tuple[Task, frozenset[int], frozenset[int]]] = []
    everything, density = frozenset(range(WIDTH)), dice.choice((0.5, 0.8, 0.95))
    for number in range(dice.randint(3, 8)):
        after = [earlier for earlier in range(number) if dice.random() < density][-8:]
        kind = dice.choice(("tile", "copy", "read", "read", "both"))
        if kind == "tile":
            start, width = dice.choice(((0, 2), (2, 2), (1, 2), (0, 4), (0, 3)))
            made = frozenset(range(start, start + width))
            bodies.append((tile(number, after, start, width), frozenset(), made))
        elif kind == "copy":
            bodies.append((copy(number, after, X, B), frozenset(), everything))
        elif kind == "read":
            bodies.append((task(number, _K.FUSED, [B], 20 + number, after, recipe=WHOLE), everything, frozenset()))
        else:
            bodies.append((task(number, _K.ADD, [B, B], B, after), everything, everything))
    return bodies


WHOLE = recipe_from_dict({
    "steps": [{"op": "COPY", "args": [{"in": 0}], "out": "final", "out_shape": [1, WIDTH], "out_dtype": "F32"}]
})  # fmt: skip


def is_safe(bodies: list[tuple[Task, frozenset[int], frozenset[int]]]) -> bool:
    """By the closure of the waits, column by column."""
    before: list[set[int]] = []
    for member, _, _ in bodies:
        direct = {wait.counter for wait in member.waits}
        before.append(direct.union(*(before[earlier] for earlier in direct)))
    for one, (_, reads, made) in enumerate(bodies):
        if reads and not reads <= frozenset().union(*(bodies[w][2] for w in before[one])):
            return False
        for other, (_, _, written) in enumerate(bodies):
            ordered = one == other or one in before[other] or other in before[one]
            if not ordered and written & (reads | made):
                return False
    return True


@pytest.mark.parametrize("block", range(2))
def test_the_verdict_is_that_of_every_pair_of_tasks(block: int) -> None:
    found = {True: 0, False: 0}
    rewritten = 0
    for seed in range(1000 * block, 1000 * (block + 1)):
        bodies = drawn(random.Random(seed))
        tasks = [member for member, _, _ in bodies]
        buffers = [*BUFFERS[:3], *(Buffer(20 + n, f"r{n}", BufferKind.ACTIVATION, _F32, (1, WIDTH)) for n in range(8))]
        tested = MegakernelProgram(buffers=buffers, counters=[Counter(n) for n in range(len(tasks))], tasks=tasks)
        result, safe = validate(tested, strict=True), is_safe(bodies)
        assert result.ok == safe, (seed, result.report())
        if safe:
            assert simulate_adversarial(tested, 8) == [], seed
            writers = [number for number, (_, _, made) in enumerate(bodies) if made]
            rewritten += any(reads and number < writers[-1] for number, (_, reads, _) in enumerate(bodies) if writers)
        found[safe] += 1
    assert min(found.values()) >= 100 and rewritten >= 50, (found, rewritten)
