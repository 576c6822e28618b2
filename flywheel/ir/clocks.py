"""Happens-before with serial queues: a step also comes after all steps before it in its queue.

The answer is exact for waits that are full joins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flywheel.ir.steps import ProofTask


class QueueOrder:
    """The relation over `steps`, asked in the order of the later step.

    `order` lists all positions, topologically by waits and queues, as `firing.fire(serial=True)` returns them. For each
    queue, and each counter that a step yet to come awaits, it holds the steps that are done, as bits.
    """

    __slots__ = ("_ahead", "_awaited", "_complete", "_heads", "_next", "_order", "_steps")

    def __init__(self, steps: Sequence[ProofTask], order: Sequence[int]) -> None:
        self._steps, self._order, self._next = steps, order, 0
        self._awaited = Counter([wait.counter for step in steps for wait in step.waits])
        self._heads: dict[tuple[int, int], int] = {}
        self._complete: dict[int, int] = {}
        self._ahead = 0

    def before(self, second: int) -> int:
        """The positions of the steps that are done before the one at `second` starts, as bits. `second` does not come
        before that of the last call in the order."""
        while not self._next or self._order[self._next - 1] != second:
            self._advance(self._order[self._next])
            self._next += 1
        return self._ahead

    def _advance(self, index: int) -> None:
        step, awaited = self._steps[index], self._awaited
        queue = None if step.sm is None else (step.rank, step.sm)
        ahead = 0 if queue is None else self._heads.get(queue, 0)
        for wait in step.waits:
            ahead |= self._complete.get(wait.counter, 0)
            awaited[wait.counter] -= 1
            if not awaited[wait.counter]:
                self._complete.pop(wait.counter, None)
        done = ahead | 1 << index
        if queue is not None:
            self._heads[queue] = done
        if awaited[step.out_counter]:
            self._complete[step.out_counter] = self._complete.get(step.out_counter, 0) | done
        self._ahead = ahead
