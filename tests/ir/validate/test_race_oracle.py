"""The race rules against brute force: closure of the dependency edges, and sets of single columns."""

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
    dependency_edges,
    simulate_adversarial,
    validate,
)
from flywheel.ir.dag import topological_positions
from flywheel.ir.order import HappensBefore
from flywheel.ir.recipe import recipe_from_dict
from flywheel.ir.validate.sweep import Touches, sweep

WIDTH = 8
SOURCE, WEIGHT, CACHE = 0, 1, 2
TRANSIENT = (3, 4, 5, 6)
BUFFERS = (
    Buffer(SOURCE, "source", BufferKind.IO_INPUT, DType.F32, (1, WIDTH)),
    Buffer(WEIGHT, "weight", BufferKind.WEIGHT, DType.F32, (WIDTH, WIDTH)),
    Buffer(CACHE, "cache", BufferKind.KV_CACHE, DType.F32, (2, 1, WIDTH)),
    *(Buffer(number, f"t{number}", BufferKind.ACTIVATION, DType.F32, (1, WIDTH)) for number in TRANSIENT),
)
ALL = frozenset(range(WIDTH))
FIRST_ROW = frozenset({WIDTH})
"""A further column of the cache: what an append at row 0 writes too, and all that attention to the past reads."""

Access = tuple[int, frozenset[int]]
Body = tuple[InstructionKind, tuple[int, ...], tuple[int, ...], dict[str, Any], list[Access], list[Access]]
"""Op, inputs, outputs, params, and the columns read and written: what the oracle believes."""


def _tile(dice: random.Random) -> tuple[int, int]:
    start = dice.choice((0, 2, 4))
    return start, dice.choice((2, 4))


def _body(dice: random.Random, written: list[int]) -> Body:
    source = dice.choice(TRANSIENT) if dice.random() < 0.1 else dice.choice((SOURCE, *written))
    target = dice.choice(TRANSIENT)
    start, width = _tile(dice)
    columns = frozenset(range(start, start + width))
    tile = {"n_off": start, "N_tile": width}
    kind = dice.randrange(6)
    if kind == 0:
        op, params = InstructionKind.GEMV_TILE, {"K": WIDTH, **tile}
        return op, (source, WEIGHT), (target,), params, [(source, ALL), (WEIGHT, ALL)], [(target, columns)]
    if kind == 1:
        return InstructionKind.GELU, (source,), (target,), {}, [(source, ALL)], [(target, ALL)]
    if kind == 2:
        pos = dice.randrange(2)
        return (
            InstructionKind.KV_APPEND,
            (source, CACHE),
            (CACHE,),
            {"pos": pos},
            [(source, ALL), (CACHE, ALL)],
            [(CACHE, ALL if pos else ALL | FIRST_ROW)],
        )
    if kind == 3:
        heads = {"head_dim": WIDTH, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0, "kv_len": 1, "scale": 1.0}
        inputs = (source, CACHE, CACHE)
        if dice.random() < 0.5:
            past = {**heads, "pos": 1, "kv_rows": 1}
            return (
                InstructionKind.ATTENTION_TILE,
                inputs,
                (target,),
                past,
                [(source, ALL), (CACHE, FIRST_ROW)],
                [(target, ALL)],
            )
        return InstructionKind.ATTENTION_TILE, inputs, (target,), heads, [(source, ALL), (CACHE, ALL)], [(target, ALL)]
    step = {"op": "COPY", "out_shape": [1, width], "out_dtype": "F32"}
    if kind == 4:
        first = _tile(dice)[0]
        steps = [{**step, "args": [{"in": 0}], "out": "final", "params": {"n_off": first, "N_tile": width}}]
        read = frozenset(range(first, first + width))
    else:
        steps = [
            {**step, "args": [{"in": 0}], "out": 0},
            {**step, "op": "ADD", "args": [{"s": 0}, {"s": 0}], "out": "final"},
        ]
        read = columns
    params = {**tile, "recipe": recipe_from_dict({"steps": steps})}
    return InstructionKind.FUSED, (source,), (target,), params, [(source, read)], [(target, columns)]


def draw(seed: int) -> tuple[MegakernelProgram, list[Body]]:
    """A random program with full joins, and its tasks' accesses."""
    dice = random.Random(seed)
    count = dice.randint(1, 8)
    bodies: list[Body] = []
    for _ in range(count):
        bodies.append(_body(dice, [number for body in bodies for number in body[2] if number != CACHE]))
    counters = [0]
    for _ in range(1, count):  # neighbours often share a counter
        counters.append(counters[-1] if dice.random() < 0.3 else max(counters) + 1)
    density = dice.choice((0.3, 0.8, 1.0))
    tasks = []
    for index, (op, inputs, outputs, params, _, _) in enumerate(bodies):
        reach = list(range(counters[index])) if dice.random() < 0.97 else list(range(max(counters) + 1))
        some = [counter for counter in reach if dice.random() < density][:8]
        waits = tuple(Wait(counter, counters.count(counter)) for counter in some)
        tasks.append(Task(10 + index, op, inputs, outputs, counters[index], waits, params))
    order = list(range(count))
    if dice.random() < 0.5:
        dice.shuffle(order)
    program = MegakernelProgram(
        buffers=BUFFERS, counters=[Counter(c) for c in range(max(counters) + 1)], tasks=[tasks[i] for i in order]
    )
    return program, [bodies[i] for i in order]


def closure(program: MegakernelProgram) -> list[list[bool]]:
    """before[i][j]: a path of dependency edges leads from task i to task j."""
    place = {task.id: index for index, task in enumerate(program.tasks)}
    count = len(place)
    before = [[False] * count for _ in range(count)]
    for first, second in dependency_edges(program):
        before[place[first]][place[second]] = True
    for middle in range(count):
        for i in range(count):
            for j in range(count):
                before[i][j] = before[i][j] or (before[i][middle] and before[middle][j])
    return before


def read_faults(bodies: list[Body], before: list[list[bool]]) -> bool:
    """Whether some read is in no order with another write of its columns, or no write comes before it."""
    for reader, (_, _, outputs, _, reads, _) in enumerate(bodies):
        for buffer, columns in reads:
            if buffer in (SOURCE, WEIGHT) or (buffer == CACHE and buffer in outputs):
                continue
            writers = [
                (writer, written & columns)
                for writer, body in enumerate(bodies)
                for number, written in body[5]
                if number == buffer and writer != reader and written & columns
            ]
            if any(not before[writer][reader] and not before[reader][writer] for writer, _ in writers):
                return True
            earlier = [written for writer, written in writers if before[writer][reader]]
            if buffer == CACHE:
                if writers and not earlier:
                    return True
            elif columns - frozenset().union(*earlier):
                return True
    return False


def write_faults(bodies: list[Body], before: list[list[bool]]) -> bool:
    """Whether two tasks write one column in no order."""
    return any(
        a == b and written & other and not (before[first][second] or before[second][first])
        for second in range(len(bodies))
        for first in range(second)
        for a, written in bodies[first][5]
        for b, other in bodies[second][5]
    )


@pytest.mark.parametrize("block", range(8))
def test_strict_validation_accepts_exactly_the_programs_without_races(block: int) -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(500 * block, 500 * (block + 1)):
        program, bodies = draw(seed)
        before = closure(program)
        cyclic = any(before[i][i] for i in range(len(bodies)))
        safe = not (cyclic or read_faults(bodies, before) or write_faults(bodies, before))
        result = validate(program, strict=True)
        assert result.ok == safe, (seed, result.report())
        verdicts[safe] += 1
    assert min(verdicts.values()) >= 20, verdicts


def touches_of(bodies: list[Body], dice: random.Random) -> list[Touches]:
    """Each column of each buffer is a cell. A task adds to what it writes, or writes it without reading it before."""
    found = []
    adding = dice.choice((0.0, 0.5, 0.9))
    for _, _, _, _, reads, writes in bodies:
        own = {(number, column) for number, columns in writes for column in columns}
        read = {(number, column) for number, columns in reads for column in columns if number > WEIGHT} - own
        cells = [tuple(sorted(number * 16 + column for number, column in some)) for some in (read, own)]
        parts = [cells[0]] if cells[0] else []
        found.append(Touches(parts, adds=[cells[1]]) if dice.random() < adding else Touches(parts, [cells[1]]))
    return found


def any_order(before: list[list[bool]], dice: random.Random) -> list[int]:
    """One of the topological orders."""
    order: list[int] = []
    while len(order) < len(before):
        free = [i for i in range(len(before)) if i not in order and all(
            j in order for j in range(len(before)) if before[j][i])]  # fmt: skip
        order.append(dice.choice(free))
    return order


def raced(touches: list[Touches], before: list[list[bool]]) -> bool:
    """Whether two tasks touch a cell in no order, and neither both read it nor both add to it."""
    reads, writes, adds = ([frozenset().union(*part) for part in parts] for parts in zip(
        *((touch.reads, touch.writes, touch.adds) for touch in touches), strict=True))  # fmt: skip
    return any(
        not before[first][second] and not before[second][first]
        and bool(writes[first] & (reads[second] | writes[second] | adds[second])
                 or writes[second] & (reads[first] | adds[first])
                 or reads[first] & adds[second] or adds[first] & reads[second])
        for first in range(len(touches)) for second in range(first)
    )  # fmt: skip


def test_the_sweep_over_cells_finds_exactly_the_programs_with_unordered_columns() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(2000):
        program, bodies = draw(seed)
        before = closure(program)
        if any(before[i][i] for i in range(len(bodies))):
            continue
        dice = random.Random(seed)
        touches = touches_of(bodies, dice)
        race = raced(touches, before)
        for order in (topological_positions(program.tasks), any_order(before, dice), any_order(before, dice)):
            found = sweep(program.tasks, order, HappensBefore(program.tasks, order), touches)
            assert bool(found.clashes) == race, (seed, order)
            for clash in found.clashes:
                assert not before[clash.first][clash.second] and not before[clash.second][clash.first]
        verdicts[race] += 1
    assert min(verdicts.values()) >= 100, verdicts


def test_an_addition_is_checked_against_the_reads_before_another_addition() -> None:
    """A write, a read after it and an addition after the read; a second addition follows only the write."""
    tasks = [
        Task(index, InstructionKind.GELU, (SOURCE,), (TRANSIENT[0],), index, waits, {})
        for index, waits in enumerate(((), (Wait(0, 1),), (Wait(1, 1),), (Wait(0, 1),)))
    ]
    cells = [(0,)]
    touches = [Touches(writes=cells), Touches(reads=cells), Touches(adds=cells), Touches(adds=cells)]
    for order in ([0, 1, 2, 3], [0, 1, 3, 2], [0, 3, 1, 2]):
        clashes = sweep(tasks, order, HappensBefore(tasks, order), touches).clashes
        assert [{clash.first, clash.second} for clash in clashes] == [{1, 3}], order


@pytest.mark.parametrize("block", range(4))
def test_no_order_of_an_accepted_program_reads_too_early_and_planted_races_show(block: int) -> None:
    found = {True: 0, False: 0}
    for seed in range(300 * block, 300 * (block + 1)):
        program, bodies = draw(seed)
        before = closure(program)
        if any(before[i][i] for i in range(len(bodies))) or write_faults(bodies, before):
            continue
        violations = simulate_adversarial(program, seeds=64)
        result = validate(program, strict=True)
        if result.ok:
            assert violations == [], (seed, violations)
        elif all(finding.code in ("race-read", "unwritten-read") for finding in result.errors):
            assert violations, (seed, result.report())
        found[result.ok] += 1
    assert min(found.values()) >= 20, found
