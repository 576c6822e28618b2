"""Happens-before with serial queues: a step also comes after all steps before it in its queue.

By vector clocks: for each step, how far each queue must be done before the step starts. The answer is exact for waits
that are full joins.
"""

from __future__ import annotations

from collections.abc import Sequence

from flywheel.ir.steps import Step


class QueueClocks:
    """The relation over `steps`, each of which is in a queue.

    `order` lists all positions, topologically by waits and queues, as `firing.fire(serial=True)` returns them.
    """

    __slots__ = ("_clocks", "_place", "_queue")

    def __init__(self, steps: Sequence[Step], order: Sequence[int]) -> None:
        queues = {
            queue: place for place, queue in enumerate(sorted({step.sm for step in steps if step.sm is not None}))
        }
        self._queue = [queues.get(-1 if step.sm is None else step.sm, -1) for step in steps]
        self._place = [0] * len(steps)
        self._clocks: list[Sequence[int]] = [()] * len(steps)
        start = [0] * len(queues)
        heads: list[Sequence[int]] = [start] * len(queues)
        complete: dict[int, Sequence[int]] = {}
        lengths = [0] * len(queues)
        for index in order:
            step, queue = steps[index], self._queue[index]
            clock = heads[queue] if queue >= 0 else start
            for wait in step.waits:
                ahead = complete.get(wait.counter)
                if ahead is not None:
                    clock = list(map(max, clock, ahead))
            self._clocks[index] = clock
            done = list(clock)
            if queue >= 0:
                lengths[queue] += 1
                self._place[index] = done[queue] = lengths[queue]
                heads[queue] = done
            known = complete.get(step.out_counter)
            complete[step.out_counter] = done if known is None else list(map(max, known, done))

    def before(self, first: int, second: int) -> bool:
        """Whether the step at position `first` is done before the one at `second` starts."""
        queue = self._queue[first]
        return queue >= 0 and self._clocks[second][queue] >= self._place[first]
