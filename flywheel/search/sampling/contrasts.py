"""What a change of one knob gains or loses: learnt from pairs of points that differ in that knob alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Final

from flywheel.search.sampling.gaussian import Grid, Point

_ALIKE: Final = 2
"""Two values of a knob count as alike once a change between them left the latency as it was at least this many times,
and more than three times as often as it changed the latency."""

_SEEN: Final = 5
"""Comparisons of a value with another before it can count as worse."""

_KnobChange = tuple[int, int, int]
"""(knob, value before, value after)."""


class Contrasts:
    """Compares points as their latencies arrive, and says what a change of one knob is likely to do at any point."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._same: Counter[_KnobChange] = Counter()
        self._seen: Counter[_KnobChange] = Counter()
        self._least: dict[_KnobChange, float] = {}  # the least loss, as a fraction of the latency

    def add(self, point: Point, values: Mapping[Point, float]) -> None:
        """Compare a point with the points that differ in one knob.

        `values` has every known latency in us, the point's included; an infeasible point's is infinite.
        """
        for knob in range(len(point)):
            for other in self._grid.beside(point, knob):
                if other in values:
                    self._compare(knob, point[knob], values[point], other[knob], values[other])

    def are_alike(self, knob: int, one: int, other: int) -> bool:
        """Whether a change between the knob's values `one` and `other` mostly left the latency as it was."""
        same = self._same[knob, one, other]
        return same >= _ALIKE and same > 3 * (self._seen[knob, one, other] - same)

    def is_vain(self, knob: int, one: int, other: int, loss: float) -> bool:
        """Whether a change of the knob from value `one` to `other` seems not worth a try.

        That is so where it mostly left the latency as it was, or lost more than the fraction `loss` of it each time.
        """
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
