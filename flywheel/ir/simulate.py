"""Counter-driven execution without numbers: what can fire, and what would read too early."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flywheel.ir.access import read_regions, written_region
from flywheel.ir.dag import producers_by_counter
from flywheel.ir.dtype import READONLY_KINDS
from flywheel.ir.records import Task

if TYPE_CHECKING:
    from flywheel.ir.program import MegakernelProgram

Pick = Callable[[list[int]], int]


def fire(tasks: Sequence[Task], pick: Pick | None = None) -> list[int]:
    """Positions in the order in which counters let tasks fire; `pick` chooses an index into the ready list.

    Without `pick`, first ready, first fired. A task that never becomes ready is missing.
    """
    waiting: dict[int, list[tuple[int, int]]] = {}
    missing = []
    for index, task in enumerate(tasks):
        pending = [(wait.counter, wait.threshold) for wait in task.waits if wait.threshold > 0]
        missing.append(len(pending))
        for counter, threshold in pending:
            waiting.setdefault(counter, []).append((threshold, index))
    for entries in waiting.values():
        entries.sort(reverse=True)
    counts: dict[int, int] = {}
    order: list[int] = []
    ready = [index for index, count in enumerate(missing) if not count]
    queue = deque(ready)
    while queue if pick is None else ready:
        if pick is None:
            index = queue.popleft()
        else:
            chosen = pick(ready)
            ready[chosen], ready[-1] = ready[-1], ready[chosen]
            index = ready.pop()
        order.append(index)
        counter = tasks[index].out_counter
        counts[counter] = count = counts.get(counter, 0) + 1
        entries = waiting.get(counter, [])
        while entries and entries[-1][0] <= count:
            consumer = entries.pop()[1]
            missing[consumer] -= 1
            if not missing[consumer]:
                (queue if pick is None else ready).append(consumer)
    return order


def simulate_counters(program: MegakernelProgram) -> tuple[list[int], list[int]]:
    """(ids in firing order, ids that never fire), ignoring SM queues."""
    order = fire(program.tasks)
    fired = set(order)
    ids = [task.id for task in program.tasks]
    return [ids[index] for index in order], [ids[i] for i in range(len(ids)) if i not in fired]


def stuck_in_queues(tasks: Sequence[Task]) -> list[int]:
    """Positions of the head tasks at which serial SM queues block for ever; empty where all finish.

    Counters only grow, so a task that may run now may run later too: the greedy walk is exact. Tasks without an SM are free.
    """
    queues: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        queues.setdefault(-1 - index if task.sm is None else task.sm, []).append(index)
    heads = dict.fromkeys(queues, 0)
    counts: dict[int, int] = {}
    sleeping: dict[int, list[tuple[int, int]]] = {}
    awake = deque(queues)
    while awake:
        name = awake.popleft()
        queue = queues[name]
        while heads[name] < len(queue):
            task = tasks[queue[heads[name]]]
            blocker = next((w for w in task.waits if counts.get(w.counter, 0) < w.threshold), None)
            if blocker is not None:
                sleeping.setdefault(blocker.counter, []).append((blocker.threshold, name))
                break
            heads[name] += 1
            counter = task.out_counter
            counts[counter] = count = counts.get(counter, 0) + 1
            sleepers = sleeping.get(counter)
            if sleepers:
                awake.extend(sleeper for threshold, sleeper in sleepers if threshold <= count)
                sleeping[counter] = [entry for entry in sleepers if entry[0] > count]
    return sorted(queues[name][heads[name]] for name in queues if heads[name] < len(queues[name]))


def simulate_adversarial(program: MegakernelProgram, seeds: int = 16) -> list[str]:
    """Reads that ran before a write of the same columns, over `seeds` firing orders; each is reported once.

    The orders: oldest first, newest first, then in turn random ones and ones that hold a single writer back as long as
    anything else can run, preferring writers that some reader does not await directly.
    """
    tasks = program.tasks
    transient = {b.id for b in program.buffers if b.kind not in READONLY_KINDS}
    writers: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        for buffer in set(task.outputs) & transient:
            writers.setdefault(buffer, []).append(index)
    suspects = _suspects(tasks, writers)
    seen: dict[str, None] = {}
    for seed in range(seeds):
        generator = random.Random(seed)
        victim = generator.choice(suspects) if suspects and seed % 2 else None
        for message in _violations(program, fire(tasks, _strategy(seed, generator, victim)), writers):
            seen.setdefault(message)
    return list(seen)


def _strategy(seed: int, generator: random.Random, victim: int | None) -> Pick | None:
    if seed == 0:
        return None
    if victim is not None:
        return lambda ready: next((i for i in reversed(range(len(ready))) if ready[i] != victim), 0)
    if seed == 2:
        return lambda ready: len(ready) - 1
    return lambda ready: generator.randrange(len(ready))


def _suspects(tasks: Sequence[Task], writers: dict[int, list[int]]) -> list[int]:
    producers = producers_by_counter(tasks)
    direct: dict[int, set[int]] = {}
    for task in tasks:
        awaited = {wait.counter for wait in task.waits if wait.threshold >= len(producers.get(wait.counter, ()))}
        for buffer in task.inputs:
            known = direct.get(buffer)
            direct[buffer] = awaited if known is None else known & awaited
    return sorted(
        {i for buffer, members in writers.items() for i in members if tasks[i].out_counter not in direct.get(buffer, ())}
    ) or sorted({index for members in writers.values() for index in members})


def _violations(program: MegakernelProgram, order: list[int], writers: dict[int, list[int]]) -> list[str]:
    tasks = program.tasks
    left = {buffer: len(members) for buffer, members in writers.items()}
    persistent = {b.id for b in program.buffers if b.kind.name == "KV_CACHE"}
    readonly = {b.id for b in program.buffers if b.kind in READONLY_KINDS}
    fired: set[int] = set()
    found = []
    for index in order:
        task = tasks[index]
        for operand, buffer in enumerate(task.inputs):
            if buffer in readonly or (buffer in left and not left[buffer]):
                continue
            if buffer not in left:
                if buffer not in persistent:
                    found.append(f"task {task.id} ({task.label}): reads buffer {buffer}, which nothing writes")
                continue
            early = [w for w in writers[buffer] if w not in fired and w != index and _overlap(tasks[w], task, buffer, operand)]
            if early:
                found.append(
                    f"task {task.id} ({task.label}): reads buffer {buffer} before task {tasks[early[0]].id} writes it"
                )
        fired.add(index)
        for buffer in set(task.outputs) & left.keys():
            left[buffer] -= 1
    return found


def _overlap(writer: Task, reader: Task, buffer: int, operand: int) -> bool:
    written = written_region(writer) if writer.outputs and writer.outputs[0] == buffer else None
    regions = read_regions(reader, operand)
    if written is None or regions is None:
        return True
    return any(start < written[1] and written[0] < end for start, end in regions)
