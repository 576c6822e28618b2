"""The sampler of a measured search that predictions steer.

The cost model tells good schedules from bad ones, but hardly which of the good ones is the best. So a descent over
predictions, none of which is a trial, finds the schedules that are worth a measurement. Then a Gaussian process learns
by how much measurements differ from predictions, and chooses what to measure next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flywheel.search.sampling.descent import Descent, kick
from flywheel.search.sampling.gaussian import Array, GaussianProcess, Grid, Point, improvement, untried
from flywheel.search.sampling.gridded import GridSampler, Tried

Foresee = Callable[[Sequence[Mapping[str, Any]]], Sequence[float | None]]
"""Predicts the latencies of parameters in us, None where infeasible."""

Expect = Callable[[Sequence[Mapping[str, Any]]], None]
"""Announces parameters that will be asked for, so that they are predicted meanwhile."""

_SIDE: Final = 8
"""Predictions that are asked for at once."""

_FIRST: Final = 12
"""Best predictions that are measured before the Gaussian process chooses."""

_APART: Final = (3, 2, 1)
"""Least number of knobs in which any two of those differ: the first number, then the next while too few are found."""

_WITHIN: Final = 0.08
"""A point whose prediction exceeds the best one by more than this fraction is a candidate only near the best trials."""

_LEARNT: Final = 200
"""Best measurements that the Gaussian process is fitted to."""

_CENTRES: Final = 2
"""Best trials, whose neighbours are candidates."""

_KICKS: Final = 16
"""Candidates of a trial that is a jump: each differs from a centre in two to four knobs."""

_AHEAD: Final = 6
"""Trials between the choice of a centre and the use of its neighbours as candidates. Meanwhile the neighbours are
predicted, while a GPU measures."""

_QUOTA: Final = 8
"""One in this many trials is a jump, whatever the expected improvements are."""

_AGAIN: Final = 0.3
"""Factor on the expected improvement of a candidate whose prediction equals a trial's: mostly it is the same program.
"""

_LUCK: Final = 0.3
"""Share of an expected improvement that is random, so that coordinators of one campaign, each with its own seed,
propose different points."""


@dataclass(frozen=True, slots=True, eq=False)
class _Learnt:
    """What trials teach. `where` are the points with a latency, best first; `logs` are logarithms of their expected
    latencies in us; `model` describes the logarithm of latency over prediction."""

    where: list[Point]
    logs: Array
    model: GaussianProcess


class ForeseenSampler(GridSampler):
    """Proposes the best of `budget` predictions that differ in some knobs, then the largest expected improvements.

    The descent over predictions begins at `starts`. A proposal depends only on the seed, the predictions and the
    study's trials, so a study that is rebuilt from its trials makes the same predictions and continues as one that was
    never interrupted. The sampler proposes no point twice before all are tried.
    """

    def __init__(
        self, seed: int, foresee: Foresee, starts: Sequence[Mapping[str, Any]], budget: int, expect: Expect
    ) -> None:
        super().__init__(seed)
        self._ask, self._starts, self._budget, self._expect = foresee, starts, budget, expect
        self._around: dict[int, list[Point]] = {}  # by trial, the points around its centres
        self._predicted: dict[Point, float | None] = {}
        self._good: list[tuple[float, Point]] = []  # the good predictions, best first
        self._finalists: list[Point] | None = None

    def propose(self, grid: Grid, tried: Sequence[Tried], number: int) -> Point:
        """The point to try next."""
        if self._finalists is None:
            self._descend(grid)
            found = sorted((value, point) for point, value in self._predicted.items() if value is not None)
            self._good = [each for each in found if each[0] <= found[0][0] * (1.0 + _WITHIN)]
            self._finalists = self._choose()
        learnt = self._learn(grid, tried)
        later = number + _AHEAD
        self._around[later] = self._surroundings(grid, learnt, later)
        self._expect([self.parameters(point) for point in self._around[later] if point not in self._predicted])
        points = {each.point for each in tried}
        best = next((point for point in self._finalists if point not in points), None)
        return best or self._improve(grid, tried, points, number, learnt)

    def _descend(self, grid: Grid) -> None:
        descent = Descent(grid)
        asked = [self.point(start) for start in self._starts]
        for number in range(self._budget):
            for point, predicted_us in zip(asked, self._foresee(asked), strict=True):
                descent.tell(point, predicted_us)
            chance = np.random.default_rng((self._seed, 2**32 + number))
            drawn = [descent.ask(chance) for _ in range(min(_SIDE, self._budget - len(self._predicted)))]
            asked = [point for point in drawn if point not in self._predicted]
            if not asked:
                return

    def _foresee(self, points: Sequence[Point]) -> list[float | None]:
        new = [point for point in dict.fromkeys(points) if point not in self._predicted]
        if new:
            self._predicted.update(zip(new, self._ask([self.parameters(point) for point in new]), strict=True))
        return [self._predicted[point] for point in points]

    def _choose(self) -> list[Point]:
        """The points to measure first: the best predictions, one for each latency, that differ in some knobs."""
        chosen: dict[Point, float] = {}
        for apart in _APART:
            for value, point in self._good:
                if len(chosen) == _FIRST:
                    break
                gaps = (sum(a != b for a, b in zip(point, other, strict=True)) for other in chosen)
                if value not in chosen.values() and min(gaps, default=apart) >= apart:
                    chosen[point] = value
        return sorted(chosen, key=lambda point: (chosen[point], point))

    def _learn(self, grid: Grid, tried: Sequence[Tried]) -> _Learnt | None:
        """What the trials teach; None where fewer than two have both a latency and a prediction."""
        self._foresee([each.point for each in tried])
        found = [(each.told[0], each.point) for each in tried if each.told is not None and each.told[0] is not None]
        known = sorted(each for each in found if self._predicted[each[1]] is not None)[:_LEARNT]
        if len(known) < 2:
            return None
        where = [point for _, point in known]
        pending = [each.point for each in tried if each.told is None and self._predicted[each.point] is not None]
        ratios = np.log([latency_us for latency_us, _ in known]) - self._logs(where)
        model = GaussianProcess(grid, where, ratios, pending)
        return _Learnt(where, self._logs(where) + model.mean + model.unit * model.means, model)

    def _surroundings(self, grid: Grid, learnt: _Learnt | None, number: int) -> list[Point]:
        """The candidates around the centres of trial `number`, which are the best trials of `learnt`."""
        if learnt is None:
            return []
        centres = [learnt.where[int(index)] for index in np.argsort(learnt.logs, kind="stable")[:_CENTRES]]
        if number % _QUOTA == _QUOTA - 1:
            chance = np.random.default_rng((self._seed, number, 1))
            starts = (centres[place % len(centres)] for place in range(_KICKS))
            return sorted({kick(grid.beside, start, 2 + place % 3, chance) for place, start in enumerate(starts)})
        return sorted({point for centre in centres for point in grid.neighbours(centre)})

    def _improve(
        self, grid: Grid, tried: Sequence[Tried], points: set[Point], number: int, learnt: _Learnt | None
    ) -> Point:
        """The candidate of the largest expected improvement over the least expected latency of any trial."""
        if number not in self._around:  # the study was rebuilt
            before = [each for each in tried if each.number < number - _AHEAD]
            self._around[number] = self._surroundings(grid, self._learn(grid, before), number)
        new = self._candidates(self._around[number], points, kicked=number % _QUOTA == _QUOTA - 1)
        if learnt is None or not new:
            return self._best_left(grid, points)
        means, deviations = learnt.model.predict(new)
        means = self._logs(new) + learnt.model.mean + learnt.model.unit * means
        gains = improvement(learnt.logs.min(), means, learnt.model.unit * deviations)
        seen = {self._predicted[point] for point in points}
        gains *= np.array([_AGAIN if self._predicted[point] in seen else 1.0 for point in new])
        chance = np.random.default_rng((self._seed, number))
        return new[int((gains * chance.uniform(1.0 - _LUCK, 1.0, len(new))).argmax())]

    def _candidates(self, around: Sequence[Point], points: set[Point], kicked: bool) -> list[Point]:
        """Feasible points that were not tried: kicks, or else neighbours and good predictions."""
        self._foresee(around)
        found = set(around)
        if not kicked:
            found.update(point for _, point in self._good)
        return sorted(point for point in found - points if self._predicted[point] is not None)

    def _best_left(self, grid: Grid, points: set[Point]) -> Point:
        """The best prediction that no trial has; without one, the nearest untried point to the best prediction."""
        good = [point for _, point in self._good] or [self.point(start) for start in self._starts]
        return next((point for point in good if point not in points), untried(grid, good[0], points))

    def _logs(self, points: Sequence[Point]) -> Array:
        """Logarithms of feasible predictions."""
        logs: Array = np.log(np.array([self._predicted[point] for point in points], dtype=np.float64))
        return logs
