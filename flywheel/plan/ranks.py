"""A program of several GPUs, split into one program for each: its own tasks, the data that arrives, and its pushes.

Source: docs/vm.md, "Ranks".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flywheel.errors import InvalidProgramError
from flywheel.ir import COMPUTE_DTYPES, Buffer, BufferKind, MegakernelProgram, Task, Wait
from flywheel.ir.draft import make_task
from flywheel.ir.exchange import pushed_counters
from flywheel.plan.handoff import copies
from flywheel.plan.sending import PushedTile, made_by, tile_pushed


@dataclass(frozen=True, slots=True)
class Part:
    """What one GPU of several runs, as a program of its own.

    `images` says where its results go: the id of a buffer here -> rank -> the id of the buffer there. `peers` are, by
    place in the list of tasks, the ranks that a task's result goes to, a bit each. A task that multiplies sends what it
    stores; any other one with peers is a push, whose output is a stand-in, one of `away`, for all that it pushes into.
    `arrived` are ids of buffers here that others push into. No task waits for a push: who reads what arrived looks at
    it until it is there. That says nothing of other columns, so an order that frees a page may be gone: no two buffers
    share memory.
    """

    program: MegakernelProgram
    rank: int
    ranks: int
    images: Mapping[int, Mapping[int, int]]
    peers: Sequence[int]
    away: frozenset[int]
    arrived: frozenset[int]


def parts_of(program: MegakernelProgram) -> tuple[Part, ...]:
    """The parts of a program of several ranks that `validate(strict=True)` accepts, by rank.

    Raises InvalidProgramError for three kinds of programs. One exchanges integers. One copies into a buffer that other
    ranks push into: copied bits may look like an element that is not there yet. One has a counter that both a push and
    a task of the counter's own GPU signal.
    """
    buffers = {buffer.id: buffer for buffer in program.buffers}
    tasks = list(program.tasks)
    remote = pushed_counters(tasks, buffers)
    pushed = {number for task in tasks for number in task.outputs if buffers[number].rank != task.rank}
    waits: dict[int, tuple[Wait, ...]] = {}  # by identity, since tasks share waits
    by_rank: list[list[Task]] = [[] for _ in range(program.ranks)]
    for task in tasks:
        for number in task.outputs:
            if number in pushed:
                _check(task, buffers[number])
        if task.out_counter in remote:
            _check_signal(task, buffers)
        known = waits.get(id(task.waits))
        if known is None:
            known = tuple([wait for wait in task.waits if wait.counter not in remote])
            waits[id(task.waits)] = known
        by_rank[task.rank].append(_alone(task, known))
    return tuple(_part(program, rank, each, buffers, pushed) for rank, each in enumerate(by_rank))


def _alone(task: Task, waits: tuple[Wait, ...]) -> Task:
    """The task in the program of its own GPU, with these waits."""
    return make_task(
        task.id, task.op, task.inputs, task.outputs, task.out_counter, waits, task.params, task.sm, task.est_bytes,
        task.est_flops, task.label, 0,
    )  # fmt: skip


def _check(task: Task, buffer: Buffer) -> None:
    what = f"task {task.id} ({task.label}): buffer {buffer.id} ({buffer.name})"
    if buffer.dtype not in COMPUTE_DTYPES:
        raise InvalidProgramError(f"{what} is {buffer.dtype.name}, and the kernel exchanges floats only")
    if buffer.rank == task.rank and copies(task, buffer.id):
        raise InvalidProgramError(f"{what} takes pushes and a COPY; a copied element may have all bits set")


def _check_signal(task: Task, buffers: Mapping[int, Buffer]) -> None:
    """Raise InvalidProgramError for a task that signals a counter which pushes signal, too.

    Nobody waits for such a counter. So it may order only the pushed data, and the proof reads it so: the counter says
    nothing about work before a push.
    """
    if all(buffers[number].rank == task.rank for number in task.outputs):
        raise InvalidProgramError(
            f"task {task.id} ({task.label}): signals counter {task.out_counter}, as pushes do; the kernel waits for no "
            f"such counter"
        )


def _part(
    program: MegakernelProgram, rank: int, tasks: list[Task], buffers: Mapping[int, Buffer], pushed: set[int]
) -> Part:
    images: dict[int, dict[int, int]] = {}
    for task in tasks:
        for number in task.outputs:
            if buffers[number].rank != rank:
                images.setdefault(task.inputs[0], {})[buffers[number].rank] = number
    kept, peers = _with_peers(tasks, buffers, rank, images.keys())
    away = frozenset(number for task in kept for number in task.outputs if buffers[number].rank != rank)
    awaited = {wait.counter for task in kept for wait in task.waits}
    own = [
        replace(buffer, rank=0, kind=BufferKind.ACTIVATION if buffer.id in away else buffer.kind)
        for buffer in program.buffers
        if buffer.rank == rank or buffer.id in away
    ]
    part = replace(
        program,
        buffers=tuple(own),
        counters=tuple([counter for counter in program.counters if counter.id in awaited]),
        tasks=tuple(kept),
        pages=None,
        ranks=1,
    )
    arrived = frozenset(number for number in pushed if buffers[number].rank == rank)
    return Part(part, rank, program.ranks, images, peers, away, arrived)


def _with_peers(
    tasks: Sequence[Task], buffers: Mapping[int, Buffer], rank: int, sources: Collection[int]
) -> tuple[list[Task], list[int]]:
    """(the tasks of a GPU, ranks that the result of each goes to).

    A push of what one product stores is left out: the product sends it. It could begin no later, and what it pushes is
    written once and has readers on the other GPU alone, which wait for it. Pushes of the same columns to several GPUs,
    on one SM and behind the same waits, are one.
    """
    made = made_by(tasks, buffers, sources)
    sent: dict[PushedTile, int] = {}
    first: dict[tuple[PushedTile, int | None, tuple[Wait, ...]], int] = {}
    joined: dict[int, int] = {}  # by the place of a push that is left: ranks
    for place, task in enumerate(tasks):
        home = buffers[task.outputs[0]].rank if task.outputs else rank
        if home == rank:
            continue
        tile = tile_pushed(task)
        if tile in made:
            sent[tile] = sent.get(tile, 0) | 1 << home
        else:
            leader = first.setdefault((tile, task.sm, tuple(task.waits)), place)
            joined[leader] = joined.get(leader, 0) | 1 << home
    senders = {made[tile]: ranks for tile, ranks in sent.items()}
    kept = [
        (task, joined.get(place, 0) | senders.get(place, 0))
        for place, task in enumerate(tasks)
        if place in joined or not task.outputs or buffers[task.outputs[0]].rank == rank
    ]
    return [task for task, _ in kept], [ranks for _, ranks in kept]
