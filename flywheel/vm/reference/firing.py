"""The order in which counters let tasks fire. It depends on waits alone, so it is found once, before any number."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from flywheel.errors import InvalidProgramError, UnknownNameError
from flywheel.ir import Task

Keys = Sequence[float]
"""Per task: of those that may fire, the one with the least key does."""


def firing_order(tasks: Sequence[Task], order: str, seed: int = 0) -> list[int]:
    """Positions of all tasks in the order in which they fire.

    `list` fires the first ready task of the list, again and again; `adversarial` the last (seed 0), or by random
    priorities, which for odd seeds hold one task back as long as anything else can run; `queues` runs each SM's tasks
    one after the other, SMs by random priorities. Raises UnknownNameError for another order and InvalidProgramError,
    naming what is waited for, where tasks never fire.
    """
    if order not in ORDERS:
        raise UnknownNameError(f"order {order!r} is not one of {', '.join(ORDERS)}")
    keys, serial = ORDERS[order](len(tasks), seed)
    return _fire(tasks, keys, _followers(tasks) if serial else {})


def _listed(count: int, seed: int) -> tuple[Keys, bool]:
    return range(count), False


def _adversarial(count: int, seed: int) -> tuple[Keys, bool]:
    if seed == 0:
        return range(count, 0, -1), False
    keys = _random(count, seed)
    if seed % 2 and count:
        keys[random.Random(-seed).randrange(count)] = 1.0
    return keys, False


def _queues(count: int, seed: int) -> tuple[Keys, bool]:
    return _random(count, seed), True


def _random(count: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.random() for _ in range(count)]


ORDERS: Final[Mapping[str, Callable[[int, int], tuple[Keys, bool]]]] = MappingProxyType(
    {"list": _listed, "adversarial": _adversarial, "queues": _queues}
)
"""By name: keys of the tasks for (their number, a seed), and whether SMs run their tasks one after the other."""


def _followers(tasks: Sequence[Task]) -> dict[int, int]:
    """Next position in the queue of the same SM; tasks without an SM are in no queue."""
    last: dict[int, int] = {}
    followers = {}
    for index, task in enumerate(tasks):
        if task.sm is not None:
            if task.sm in last:
                followers[last[task.sm]] = index
            last[task.sm] = index
    return followers


def _waiting(tasks: Sequence[Task]) -> dict[int, list[tuple[int, int]]]:
    """(threshold, position) of the waits for each counter, the lowest threshold last."""
    waiting: dict[int, list[tuple[int, int]]] = {}
    for index, task in enumerate(tasks):
        for wait in task.waits:
            if wait.threshold > 0:
                waiting.setdefault(wait.counter, []).append((wait.threshold, index))
    for entries in waiting.values():
        entries.sort(reverse=True)
    return waiting


def _fire(tasks: Sequence[Task], keys: Keys, followers: Mapping[int, int]) -> list[int]:
    waiting = _waiting(tasks)
    missing = [0] * len(tasks)
    for index in (*followers.values(), *(index for entries in waiting.values() for _, index in entries)):
        missing[index] += 1
    ready = [(keys[index], index) for index, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    counts: dict[int, int] = {}
    order = []
    while ready:
        index = heapq.heappop(ready)[1]
        order.append(index)
        counter = tasks[index].out_counter
        counts[counter] = count = counts.get(counter, 0) + 1
        released = [followers[index]] if index in followers else []
        entries = waiting.get(counter, [])
        while entries and entries[-1][0] <= count:
            released.append(entries.pop()[1])
        for consumer in released:
            missing[consumer] -= 1
            if not missing[consumer]:
                heapq.heappush(ready, (keys[consumer], consumer))
    if len(order) < len(tasks):
        raise InvalidProgramError(_stuck(tasks, set(order), counts))
    return order


def _stuck(tasks: Sequence[Task], fired: set[int], counts: Mapping[int, int]) -> str:
    blocked = [
        f"task {task.id} ({task.label}) waits for counter {wait.counter} >= {wait.threshold}, "
        f"which stands at {counts.get(wait.counter, 0)}"
        for index, task in enumerate(tasks)
        if index not in fired
        for wait in task.waits
        if counts.get(wait.counter, 0) < wait.threshold
    ]
    more = f"; and {len(blocked) - 4} more waits" if len(blocked) > 4 else ""
    return f"{len(tasks) - len(fired)} of {len(tasks)} tasks never fire: {'; '.join(blocked[:4])}{more}"
