"""Execution by counters, without numbers: the order in which tasks fire, and the tasks that never do.

Counters only grow, so a task that may fire now may also fire later. Therefore one greedy walk, in any order, fires all
tasks or shows the ones that never fire. All code that asks what counters allow uses `walk`, except the cost model's
engine, where times decide the order. A `ProofTask` is what they know of a task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from heapq import heapify, heappop, heappush
from typing import Protocol

from flywheel.ir.records import Wait


class ProofTask(Protocol):
    """A task of a flywheel program, or of another runtime with monotone counters and serial queues.

    When it completes it adds 1 to `out_counter`. Steps with equal waits may share the sequence, which is then checked
    once.
    """

    @property
    def id(self) -> int:
        """Number in messages."""

    @property
    def label(self) -> str:
        """Name in messages."""

    @property
    def waits(self) -> Sequence[Wait]:
        """The waits that must hold before it starts."""

    @property
    def out_counter(self) -> int:
        """The counter that it signals."""

    @property
    def rank(self) -> int:
        """The GPU that runs it."""

    @property
    def sm(self) -> int | None:
        """The serial queue, on that GPU, that holds it, in list order; None where no queue does."""


Need = tuple[int, int]
"""(counter, the number of signals that it needs, at least 1)"""


def walk(
    needs: Sequence[Sequence[Need]],
    signals: Sequence[int],
    keys: Sequence[float] | None = None,
    followers: Mapping[int, int] | None = None,
) -> list[int]:
    """Positions in the order in which they fire. A position that can never fire is left out.

    `needs[i]` is what i waits for, `signals[i]` the counter that it signals, and `followers[i]` fires after i. Of the
    positions that may fire, the one with the least key is next; without `keys`, the one that has been ready for
    longest.
    """
    behind = followers or {}
    waiting = _waiting(needs)
    missing = [len(wanted) for wanted in needs]
    for index in behind.values():
        missing[index] += 1
    arrived = deque(index for index, count in enumerate(missing) if not count)
    ranked = [] if keys is None else [(keys[index], index) for index in arrived]
    heapify(ranked)

    def release(index: int) -> None:
        missing[index] -= 1
        if missing[index]:
            return
        if keys is None:
            arrived.append(index)
        else:
            heappush(ranked, (keys[index], index))

    counts: dict[int, int] = {}
    order: list[int] = []
    while ranked or (keys is None and arrived):
        index = arrived.popleft() if keys is None else heappop(ranked)[1]
        order.append(index)
        counter = signals[index]
        counts[counter] = count = counts.get(counter, 0) + 1
        if index in behind:
            release(behind[index])
        entries = waiting.get(counter, [])
        while entries and entries[-1][0] <= count:
            release(entries.pop()[1])
    return order


def _waiting(needs: Sequence[Sequence[Need]]) -> dict[int, list[tuple[int, int]]]:
    """Counter -> (threshold, position) of its waiters, the lowest threshold last."""
    waiting: dict[int, list[tuple[int, int]]] = {}
    for index, wanted in enumerate(needs):
        for counter, threshold in wanted:
            waiting.setdefault(counter, []).append((threshold, index))
    for entries in waiting.values():
        entries.sort(reverse=True)
    return waiting


def fire(tasks: Sequence[ProofTask], keys: Sequence[float] | None = None, serial: bool = False) -> list[int]:
    """Positions in the order in which counters let tasks fire; `walk` chooses by `keys`.

    With `serial`, each SM runs its tasks one after the other.
    """
    shared = {id(task.waits): task.waits for task in tasks}
    needs = {
        identity: [(wait.counter, wait.threshold) for wait in waits if wait.threshold > 0]
        for identity, waits in shared.items()
    }
    followers = _followers(tasks) if serial else None
    return walk([needs[id(task.waits)] for task in tasks], [task.out_counter for task in tasks], keys, followers)


def stuck_in_queues(tasks: Sequence[ProofTask]) -> list[int]:
    """Positions of the tasks at which serial SM queues block for ever; empty where all queues finish.

    Tasks without an SM are in no queue.
    """
    fired = set(fire(tasks, serial=True))
    behind = set(_followers(tasks, fired).values())
    return [index for index in range(len(tasks)) if index not in fired and index not in behind]


def _followers(tasks: Sequence[ProofTask], gone: Set[int] = frozenset()) -> dict[int, int]:
    """Position -> the next position in the queue of its SM, if `gone` positions are removed.

    Tasks without an SM are in no queue.
    """
    last: dict[tuple[int, int], int] = {}
    followers = {}
    for index, task in enumerate(tasks):
        if task.sm is None or index in gone:
            continue
        queue = task.rank, task.sm
        if queue in last:
            followers[last[queue]] = index
        last[queue] = index
    return followers
