"""What one value of a knob is worth beside another: learnt from points that differ in that knob alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Final

from flywheel.search.sampling.gaussian import Grid, Point

_ALIKE: Final = 2
"""Times that two values of a knob must have made no difference, and more than three times as often as they made one, to
be taken for alike."""

_SEEN: Final = 5
"""Times that a value must have been compared with another before it can be taken for worse."""

_Change = tuple[int, int, int]
"""A knob, and from which value to which."""


class Contrasts:
    """Told points as their values come; asked what a change of one knob is likely to do, wherever it is made."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._same: Counter[_Change] = Counter()
        self._seen: Counter[_Change] = Counter()
        self._least: dict[_Change, float] = {}  # of what was lost, as part of the latency

    def add(self, point: Point, values: Mapping[Point, float]) -> None:
        """Compare a point with those around it. `values` are all latencies that are known, infinite where infeasible;
        the point's is among them."""
        for knob in range(len(point)):
            for other in self._grid.beside(point, knob):
                if other in values:
                    self._compare(knob, point[knob], values[point], other[knob], values[other])

    def are_alike(self, knob: int, one: int, other: int) -> bool:
        """Whether two values of the knob mostly made no difference."""
        same = self._same[knob, one, other]
        return same >= _ALIKE and same > 3 * (self._seen[knob, one, other] - same)

    def is_vain(self, knob: int, one: int, other: int, loss: float) -> bool:
        """Whether the other value of the knob mostly made no difference to the one, or lost more than `loss` of the
        latency each time."""
        change = knob, one, other
        return self.are_alike(*change) or (self._seen[change] >= _SEEN and self._least[change] > loss)

    def _compare(self, knob: int, one: int, value: float, other: int, beside: float) -> None:
        if value == beside == inf:
            return
        for change, before, after in (((knob, one, other), value, beside), ((knob, other, one), beside, value)):
            self._seen[change] += 1
            self._same[change] += before == after
            lost = -inf if before == inf else (after - before) / (before or 1.0)
            self._least[change] = min(self._least.get(change, inf), lost)
