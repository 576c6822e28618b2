"""The sampler of a search that predicts: a Gaussian process leads the first trials, many descents the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from flywheel.search.sampling import local
from flywheel.search.sampling.descent import Descent
from flywheel.search.sampling.gaussian import Grid, Point
from flywheel.search.sampling.gridded import GridSampler, Tried

LED: Final = 160
"""Trials that LocalSampler's Gaussian process leads. It comes near the best in fewer trials than a descent, but then
gets no further."""

BEHIND: Final = 2
"""A proposal ignores the outcomes of this many last trials, known or not. So one more than this many trials can run
side by side without a change to what is proposed. The larger the number, the more trials the Gaussian process needs."""


class DescentSampler(GridSampler):
    """Proposes what LocalSampler would for the first LED trials, then what a descent asks for.

    It proposes no point twice before all are tried. A trial's point depends on the seed and on the earlier trials: on
    their points and, but for the last BEHIND trials, on their outcomes. So a study that is rebuilt from its trials
    continues as one that was never interrupted.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._descent: Descent | None = None
        self._seen = 0  # trials that the descent knows of
        self._untold: list[int] = []  # those of them whose outcomes the descent does not know yet
        self._chosen: Point | None = None  # for trial `_seen`

    def propose(self, grid: Grid, tried: Sequence[Tried], number: int) -> Point:
        """The point to try next."""
        if number < LED:
            return _lead(grid, tried, number, self._chance(number))
        self._descent = self._descent or Descent(grid)
        found = {each.number: each for each in tried}
        while self._seen < number:
            if self._seen in found:
                self._pass(self._descent, found[self._seen].point, found)
            self._seen, self._chosen = self._seen + 1, None
        self._tell(found)
        self._chosen = self._descent.ask(self._chance(number))
        return self._chosen

    def _pass(self, descent: Descent, point: Point, found: Mapping[int, Tried]) -> None:
        """Tell the descent the point of trial `_seen`, whether it asked for that point or somebody else did."""
        if self._chosen is None and self._seen >= LED:
            self._tell(found)
            ahead = descent.fork()
            if ahead.ask(self._chance(self._seen)) == point:
                self._descent = descent = ahead
        descent.note(point)
        self._untold.append(self._seen)

    def _tell(self, found: Mapping[int, Tried]) -> None:
        """Tell the descent the outcomes that a proposal of trial `_seen` may use."""
        assert self._descent is not None
        for earlier in [each for each in self._untold if each < self._seen - BEHIND]:
            told = found[earlier].told
            if told is not None:
                self._descent.tell(told[1], told[0])
                self._untold.remove(earlier)

    def _chance(self, number: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, number))


def _lead(grid: Grid, tried: Sequence[Tried], number: int, chance: np.random.Generator) -> Point:
    """LocalSampler's proposal from the outcomes that trial `number` may use.

    While too few of those are feasible, it is a point one step from a trial under way.
    """
    known = [each.told for each in tried if each.told is not None and each.number < number - BEHIND]
    pending = [each.point for each in tried if each.told is None or each.number >= number - BEHIND]
    if len(pending) > 1 and sum(value is not None for value, _ in known) < local.FIRST:
        points = {each.point for each in tried}
        steps = [point for point in grid.steps(pending[1]) if point not in points]
        if steps:
            return steps[int(chance.integers(len(steps)))]
    return local.propose(grid, known, pending, chance)
