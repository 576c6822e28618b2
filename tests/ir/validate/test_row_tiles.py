"""Tiles of several rows against brute force over single elements: what is accepted has no race."""

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

ROWS, WIDTH = 4, 8
NUMEL = ROWS * WIDTH
SOURCE = 0
TRANSIENT = (2, 3)
WEIGHTS = {1: 11, 2: 12, 4: 14}
"""By rows of x."""
BUFFERS = (
    Buffer(SOURCE, "source", BufferKind.IO_INPUT, DType.F32, (ROWS, WIDTH)),
    *(
        Buffer(number, f"w{rows}", BufferKind.WEIGHT, DType.F32, (NUMEL // rows, NUMEL // rows))
        for rows, number in WEIGHTS.items()
    ),
    *(Buffer(number, f"t{number}", BufferKind.ACTIVATION, DType.F32, (ROWS, WIDTH)) for number in TRANSIENT),
)
Cells = frozenset[int]
Body = tuple[Task, dict[int, Cells], dict[int, Cells]]
"""A task, and the elements that it reads and writes."""


def cells(rows: int, start: int, width: int) -> Cells:
    pitch = NUMEL // rows
    return frozenset(row * pitch + column for row in range(rows) for column in range(start, start + width))


def body(dice: random.Random, number: int, waits: tuple[Wait, ...], written: list[int]) -> Body:
    source, target = dice.choice((SOURCE, *written)), dice.choice(TRANSIENT)
    rows = dice.choice((1, 2, 4, 4, 4))
    width = dice.choice((4, 4, 8))
    start = dice.choice(range(0, NUMEL // rows - width + 1, 4))
    tile = {"n_off": start, "N_tile": width}
    everything, made = cells(1, 0, NUMEL), cells(rows, start, width)

    def task(op: InstructionKind, inputs: tuple[int, ...], params: dict[str, Any]) -> Task:
        return Task(number, op, inputs, (target,), number, waits, params)

    if dice.random() < 0.3:
        depth = NUMEL // rows
        params = {"M_tile": rows, "K": depth, **tile}
        return task(InstructionKind.GEMM_TILE, (source, WEIGHTS[rows]), params), {source: everything}, {target: made}
    several = {"M_tile": rows} if rows > 1 or dice.random() < 0.5 else {}
    step = {"args": [{"in": 0}], "out": "final", "out_shape": [rows, width], "out_dtype": "F32"}
    if dice.random() < 0.5:
        whole = {**step, "op": "GELU", "out": 0, "out_shape": [ROWS, WIDTH]}
        recipe = recipe_from_dict({"steps": [whole, {**step, "op": "COPY", "params": several, "args": [{"s": 0}]}]})
        reads = everything
    else:
        recipe = recipe_from_dict({"steps": [{**step, "op": "COPY", "params": several}]})
        reads = made
    params = {**tile, **several, "recipe": recipe}
    return task(InstructionKind.FUSED, (source,), params), {source: reads}, {target: made}


def draw(seed: int) -> list[Body]:
    dice = random.Random(seed)
    bodies: list[Body] = []
    for number in range(dice.randint(2, 7)):
        some = [earlier for earlier in range(number) if dice.random() < 0.45][:8]
        written = [each for _, _, writes in bodies for each in writes]
        bodies.append(body(dice, number, tuple(Wait(earlier, 1) for earlier in some), written))
    return bodies


def races(bodies: list[Body]) -> bool:
    after: list[set[int]] = []
    for task, _, _ in bodies:
        direct = {wait.counter for wait in task.waits}
        after.append(direct.union(*(after[earlier] for earlier in direct)))

    def ordered(one: int, other: int) -> bool:
        return one in after[other] or other in after[one]

    for number, (_, reads, writes) in enumerate(bodies):
        for buffer, touched in reads.items():
            others = [(place, each[2].get(buffer, frozenset())) for place, each in enumerate(bodies) if place != number]
            if any(made & touched and not ordered(place, number) for place, made in others):
                return True
            writers = [each[0] for each in bodies if buffer in each[2]]
            # Writers that disagree on rows count whole, so what they leave out does not show.
            agree = len({writer.params.get("M_tile", 1) for writer in writers}) == 1
            earlier = [made for place, made in others if place in after[number]]
            if buffer != SOURCE and agree and touched - frozenset().union(*earlier):
                return True
        for buffer, touched in writes.items():
            if any(
                touched & bodies[earlier][2].get(buffer, frozenset()) and not ordered(earlier, number)
                for earlier in range(number)
            ):
                return True
    return False


@pytest.mark.parametrize("block", range(2))
def test_what_strict_validation_accepts_has_no_race(block: int) -> None:
    accepted = unordered = 0
    for seed in range(1500 * block, 1500 * (block + 1)):
        bodies = draw(seed)
        tasks = [task for task, _, _ in bodies]
        program = MegakernelProgram(
            buffers=BUFFERS, counters=[Counter(number) for number in range(len(tasks))], tasks=tasks
        )
        if not validate(program, strict=True).ok:
            continue
        assert not races(bodies), seed
        assert simulate_adversarial(program, 8) == [], seed
        accepted += 1
        several = [task for task in tasks if task.params.get("M_tile", 1) > 1]
        first = [task.outputs for task in several if not task.waits]
        unordered += len(set(first)) < len(first)
    assert accepted >= 50 and unordered >= 2, (accepted, unordered)
