"""A small program of two ranks: sums of what both make, the first of which is pushed in two tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from flywheel.ir import (
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    Task,
    Wait,
)
from flywheel.ir.recipe import Recipe, recipe_from_dict

_K, _B = InstructionKind, BufferKind
WIDTH = 8

def buffers(sums: int) -> list[Buffer]:
    """Of each rank the input, then of each sum the shard of either rank, and the sum; those of rank 1 are 10 more."""
    kinds = {0: _B.IO_INPUT, 3 * sums: _B.IO_OUTPUT}
    return [
        Buffer(10 * rank + k, f"b{k}@{rank}", kinds.get(k, _B.ACTIVATION), DType.F32, (WIDTH,), rank=rank)
        for rank in range(2)
        for k in range(3 * sums + 1)
    ]


def copy_recipe(**params: int) -> Recipe:
    shape = [params["N_tile"]]
    step = {"op": "COPY", "args": [{"in": 0}], "out": "final", "params": {}, "out_shape": shape, "out_dtype": "F32"}
    return recipe_from_dict({"steps": [step]})


def push(number: int, source: int, image: int, counter: int, waits: tuple[Wait, ...], n_off: int, width: int) -> Task:
    params = {"n_off": n_off, "N_tile": width, "recipe": copy_recipe(N_tile=width)}
    return Task(number, _K.FUSED, (source,), (image,), counter, waits, params, 0, label="push", rank=source // 10)


def tasks_of(rank: int, sums: int) -> list[Task]:
    """Of each sum: what makes this rank's shard, pushes it, and adds. Counters: made, arrived here, added."""
    own, peer = 10 * rank, 10 - 10 * rank
    tasks: list[Task] = []
    for each in range(sums):
        made, came, added = (own + 3 * each + place for place in range(3))
        there = came + peer - own
        source, (first, second, total) = own + 3 * each, (own + 3 * each + place for place in (1, 2, 3))
        mine = first + rank
        before = () if each == 0 else (Wait(made - 1, 1),)
        tiles = [(0, 4), (4, 4)] if each == 0 else [(0, WIDTH)]
        number = own + len(tasks)
        tasks.append(Task(number, _K.GELU, (source,), (mine,), made, before, {}, 0, label="gelu", rank=rank))
        for start, width in tiles:
            image = mine + peer - own
            tasks.append(push(own + len(tasks), mine, image, there, (Wait(made, 1),), start, width))
        waits, shards = (Wait(made, 1), Wait(came, len(tiles))), (first, second)
        number = own + len(tasks)
        tasks.append(
            Task(number, _K.ALLREDUCE_SHARD, shards, (total,), added, waits, {}, 0, label="sum", rank=rank)
        )
    return tasks


def two_ranks(sums: int = 2) -> MegakernelProgram:
    """Tasks 0, 1, 2, 3 of rank 0 make the first sum, 4, 5, 6 the second; those of rank 1 are 10 more."""
    tasks = [task for pair in zip(tasks_of(0, sums), tasks_of(1, sums), strict=True) for task in pair]
    counters = [Counter(10 * rank + number) for rank in range(2) for number in range(3 * sums)]
    return MegakernelProgram(
        buffers=tuple(buffers(sums)), counters=tuple(counters), tasks=tuple(tasks), ranks=2
    )


def changed(program: MegakernelProgram, number: int, **values: Any) -> MegakernelProgram:
    """The program with fields of one task changed."""
    return replace(program, tasks=tuple(replace(t, **values) if t.id == number else t for t in program.tasks))


def with_buffer(program: MegakernelProgram, number: int, **values: Any) -> MegakernelProgram:
    """The program with fields of one buffer changed."""
    return replace(program, buffers=tuple(replace(b, **values) if b.id == number else b for b in program.buffers))


def without(program: MegakernelProgram, *numbers: int) -> MegakernelProgram:
    """The program without some tasks; what awaits their counters needs as many signals less."""
    gone = [task for task in program.tasks if task.id in numbers]
    kept = [task for task in program.tasks if task.id not in numbers]

    def fewer(wait: Wait) -> Wait:
        return Wait(wait.counter, wait.threshold - sum(task.out_counter == wait.counter for task in gone))

    waits = [tuple(each for each in map(fewer, task.waits) if each.threshold) for task in kept]
    return replace(program, tasks=tuple(replace(t, waits=w) for t, w in zip(kept, waits, strict=True)))


def with_task(program: MegakernelProgram, task: Task) -> MegakernelProgram:
    """The program with one more task, and its counter."""
    return replace(program, tasks=(*program.tasks, task), counters=(*program.counters, Counter(task.out_counter)))


Program = MegakernelProgram

FAULTS: Final[dict[str, tuple[str, Callable[[Program], Program]]]] = {
    "a buffer on a third": ("rank-range", lambda p: with_buffer(p, 3, rank=2)),
    "a task on a third": ("rank-range", lambda p: changed(p, 0, rank=2)),
    "no rank at all": ("rank-range", lambda p: replace(p, ranks=0)),
    "a third that does nothing": ("rank-range", lambda p: replace(p, ranks=3)),
    "ranks without their number": ("rank-range", lambda p: replace(p, ranks=1)),
    "a read across": ("remote-access", lambda p: changed(p, 4, inputs=(13,))),
    "a write across": ("remote-access", lambda p: changed(p, 4, outputs=(14,))),
    "a counter awaited by both": ("remote-counter", lambda p: changed(p, 14, waits=(Wait(12, 1), Wait(2, 1)))),
    "a plain task that signals across": (
        "remote-counter",
        lambda p: changed(
            changed(changed(p, 6, out_counter=13), 15, waits=(Wait(13, 2),)), 16, waits=(Wait(13, 2), Wait(14, 1))
        ),
    ),
    "pushed twice": ("race-write", lambda p: changed(p, 2, params=p.tasks[2].params)),
    "pushed over what is made here": ("race-write", lambda p: changed(p, 1, outputs=(12,))),
    "written again when it is read": (
        "push-again",
        lambda p: with_task(p, Task(9, InstructionKind.GELU, (13,), (11,), 19, (Wait(12, 1),), {}, 0, rank=1)),
    ),
    "pushed and not read": (
        "push-unread",
        lambda p: changed(p, 13, op=InstructionKind.GELU, inputs=(12,), waits=(Wait(10, 1),)),
    ),
    "one exchange less": ("collective", lambda p: with_buffer(without(p, 5, 16), 16, kind=BufferKind.ACTIVATION)),
    "shards in another order": ("collective", lambda p: changed(p, 6, inputs=(5, 4))),
    "a shard that is not added": ("collective", lambda p: changed(p, 6, op=InstructionKind.ADD, inputs=(5, 4))),
    "half a shard": ("partial-write", lambda p: without(p, 2)),
    "sums of two types": ("collective", lambda p: with_buffer(p, 3, dtype=DType.BF16)),
    "a wait for the peer left out": ("race-read", lambda p: changed(p, 3, waits=(Wait(0, 1),))),
    "a push before it is made": ("race-read", lambda p: changed(p, 1, waits=())),
}
"""By name: the code of what is wrong, and how it gets there."""
