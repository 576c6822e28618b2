"""The order in which counters let tasks fire. It depends only on waits, so it is computed once, before a launch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final

from flywheel.errors import InvalidProgramError, UnknownNameError
from flywheel.ir import Task
from flywheel.ir.firing import fire

Keys = Sequence[float]
"""A key for each task. Of the ready tasks, the one with the smallest key fires."""


def firing_order(tasks: Sequence[Task], order: str, seed: int = 0) -> list[int]:
    """Indices of all tasks in the order in which they fire.

    `list` fires the first ready task of the list. `adversarial` fires the last ready one (seed 0), or follows random
    priorities; with an odd seed it also delays one task for as long as another can fire. `queues` runs each SM's tasks
    in sequence, with random priorities for SMs. Raises UnknownNameError for another order, and InvalidProgramError,
    which names the missing signals, if tasks never fire.
    """
    if order not in ORDERS:
        raise UnknownNameError(f"order {order!r} is not one of {', '.join(ORDERS)}")
    keys, serial = ORDERS[order](len(tasks), seed)
    fired = fire(tasks, keys, serial)
    if len(fired) < len(tasks):
        raise InvalidProgramError(_stuck(tasks, set(fired)))
    return fired


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
"""Name -> a function of (number of tasks, seed) that returns the keys, and whether each SM runs its tasks in
sequence."""


def _stuck(tasks: Sequence[Task], fired: Set[int]) -> str:
    counts = Counter(tasks[index].out_counter for index in fired)
    blocked = [
        f"task {task.id} ({task.label}) waits for counter {wait.counter} >= {wait.threshold}, "
        f"which stands at {counts[wait.counter]}"
        for index, task in enumerate(tasks)
        if index not in fired
        for wait in task.waits
        if counts[wait.counter] < wait.threshold
    ]
    more = f"; and {len(blocked) - 4} more waits" if len(blocked) > 4 else ""
    return f"{len(tasks) - len(fired)} of {len(tasks)} tasks never fire: {'; '.join(blocked[:4])}{more}"
