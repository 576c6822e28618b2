"""The sampler of a search that predicts: led by a Gaussian process at first, then descent from many starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from flywheel.search.sampling import local
from flywheel.search.sampling.descent import Descent
from flywheel.search.sampling.gaussian import Grid, Point
from flywheel.search.sampling.gridded import GridSampler, Tried

LED: Final = 160
"""Trials that the Gaussian process of LocalSampler leads: it takes fewer than a descent to come near the best, but then
stays where it is."""

BEHIND: Final = 2
"""Last trials whose outcome a proposal does not look at, be it known or not: so many and one more may run side by side,
and the same is proposed. The Gaussian process needs more trials for each of them."""


class DescentSampler(GridSampler):
    """Proposes what LocalSampler would, then what a descent asks for: no point twice before all are tried.

    The point of a trial depends on the seed and on the trials before it, of the BEHIND last ones on their points alone:
    a study that is rebuilt from its trials goes on as if it had never ended.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._descent: Descent | None = None
        self._seen = 0  # trials that the descent knows of
        self._untold: list[int] = []  # of these, whose outcomes it does not know
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
        """Go on to the next trial: what came of this one is what was asked for, or somebody else's."""
        if self._chosen is None and self._seen >= LED:
            self._tell(found)
            ahead = descent.fork()
            if ahead.ask(self._chance(self._seen)) == point:
                self._descent = descent = ahead
        descent.note(point)
        self._untold.append(self._seen)

    def _tell(self, found: Mapping[int, Tried]) -> None:
        """Tell what may be known when trial `_seen` is proposed."""
        assert self._descent is not None
        for earlier in [each for each in self._untold if each < self._seen - BEHIND]:
            told = found[earlier].told
            if told is not None:
                self._descent.tell(told[1], told[0])
                self._untold.remove(earlier)

    def _chance(self, number: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, number))


def _lead(grid: Grid, tried: Sequence[Tried], number: int, chance: np.random.Generator) -> Point:
    """As LocalSampler, by what may be known; while that is next to nothing, a step from what is under way."""
    known = [each.told for each in tried if each.told is not None and each.number < number - BEHIND]
    pending = [each.point for each in tried if each.told is None or each.number >= number - BEHIND]
    if len(pending) > 1 and sum(value is not None for value, _ in known) < local.FIRST:
        points = {each.point for each in tried}
        steps = [point for point in grid.steps(pending[1]) if point not in points]
        if steps:
            return steps[int(chance.integers(len(steps)))]
    return local.propose(grid, known, pending, chance)
