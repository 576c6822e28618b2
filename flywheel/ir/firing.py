"""Counter-driven execution without numbers: what fires when, and what blocks for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from flywheel.ir.records import Task


def fire(tasks: Sequence[Task], priority: Sequence[float] | None = None) -> list[int]:
    """Positions in the order in which counters let tasks fire: of the ready ones, the one of lowest `priority` first.

    Without `priority`, first ready, first fired. A task that never becomes ready is missing.
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
    arrived = deque(index for index, count in enumerate(missing) if not count)
    ranked = [] if priority is None else [(priority[index], index) for index in arrived]
    heapify(ranked)
    while ranked or (priority is None and arrived):
        index = arrived.popleft() if priority is None else heappop(ranked)[1]
        order.append(index)
        counter = tasks[index].out_counter
        counts[counter] = count = counts.get(counter, 0) + 1
        entries = waiting.get(counter, [])
        while entries and entries[-1][0] <= count:
            consumer = entries.pop()[1]
            missing[consumer] -= 1
            if not missing[consumer]:
                if priority is None:
                    arrived.append(consumer)
                else:
                    heappush(ranked, (priority[consumer], consumer))
    return order


def stuck_in_queues(tasks: Sequence[Task]) -> list[int]:
    """Positions of the head tasks at which serial SM queues block for ever; empty where all finish.

    Counters only grow, so a task that may run now may run later too: the greedy walk is exact. Tasks without an SM are
    free.
    """
    queues: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        queues.setdefault(-1 - index if task.sm is None else task.sm, []).append(index)
    heads = dict.fromkeys(queues, 0)
    counts: dict[int, int] = {}
    sleeping: dict[int, list[tuple[int, int]]] = {}  # counter -> heap of (threshold, queue)
    awake = deque(queues)
    while awake:
        name = awake.popleft()
        queue = queues[name]
        while heads[name] < len(queue):
            task = tasks[queue[heads[name]]]
            blocker = next((w for w in task.waits if counts.get(w.counter, 0) < w.threshold), None)
            if blocker is not None:
                heappush(sleeping.setdefault(blocker.counter, []), (blocker.threshold, name))
                break
            heads[name] += 1
            counter = task.out_counter
            counts[counter] = count = counts.get(counter, 0) + 1
            sleepers = sleeping.get(counter, [])
            while sleepers and sleepers[0][0] <= count:
                awake.append(heappop(sleepers)[1])
    return sorted(queues[name][heads[name]] for name in queues if heads[name] < len(queues[name]))
