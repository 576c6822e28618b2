"""The sampler of a measured search that predictions and measurements of other works steer.

The cost model tells good schedules from bad ones, but hardly which of the good ones is the best, and what was good
elsewhere is not always good here. So the sampler measures a few starts, and then walks: it measures what differs from
the best trials in one or two knobs and has the largest expected improvement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np

from flywheel.search.sampling.expectation import Expectation, Lessons, axes_of
from flywheel.search.sampling.gaussian import Array, Grid, Point, improvement, untried
from flywheel.search.sampling.gridded import GridSampler, Tried

Foresee = Callable[[Sequence[Mapping[str, Any]]], Sequence[float | None]]
"""Predicts the latencies of parameters in us, None where infeasible."""

Expect = Callable[[Sequence[Mapping[str, Any]]], None]
"""Announces parameters that will be asked for, so that they are predicted meanwhile."""

_FIRST: Final = 3
"""Starts that are measured first. All that is measured near one start says nothing of how good others are."""

_LEARNT: Final = 200
"""Best measurements that expectations are fitted to."""

_CENTRES: Final = 2
"""Best trials, whose neighbours are candidates."""

_ONES, _PAIRS = 24, 16
"""Most promising changes of one knob of the best trial, and most promising pairs of them that are candidates."""

_AGAIN: Final = 0.3
"""Factor on the expected improvement of a candidate whose prediction equals a trial's: mostly it is the same program.
"""

_LUCK: Final = 0.3
"""Share of an expected improvement that is random, so that coordinators of one campaign, each with its own seed,
propose different points."""


@dataclass(frozen=True, slots=True, eq=False)
class _Learnt:
    """What trials teach. `where` are the points with a latency, best first, `at` their predictions and `latencies` what
    was told, in us; points that are under way count as if they turn out as expected. `logs` are logarithms of what is
    expected at each."""

    where: list[Point]
    at: Array
    latencies: Array
    logs: Array


class ForeseenSampler(GridSampler):
    """Proposes the best of `starts`, then the largest expected improvements near the best trials.

    `lessons` are what other works teach. A proposal depends only on the seed, the predictions, the lessons and the
    study's trials, so a study that is rebuilt from its trials continues as one that was never interrupted. The sampler
    proposes no point twice before all are tried.
    """

    def __init__(
        self,
        seed: int,
        foresee: Foresee,
        starts: Sequence[Mapping[str, Any]],
        expect: Expect,
        lessons: Lessons | None = None,
    ) -> None:
        super().__init__(seed)
        self._ask, self._starts, self._expect, self._lessons = foresee, starts, expect, lessons
        self._predicted: dict[Point, float | None] = {}
        self._firsts: list[Point] = []  # the starts with programs, those of which most is expected first
        self._model: Expectation | None = None

    def propose(self, grid: Grid, tried: Sequence[Tried], number: int) -> Point:
        """The point to try next."""
        if self._model is None:
            self._model = Expectation(axes_of(grid, list(self._values), self._lessons), self._lessons)
            self._firsts = self._order(self._model, [self.point(start) for start in self._starts])
        point = self._improve(grid, {each.point for each in tried}, number, self._learn(tried))
        self._expect([self.parameters(near) for near in grid.neighbours(point) if near not in self._predicted])
        return point

    def _order(self, model: Expectation, points: Sequence[Point]) -> list[Point]:
        """Points with programs, one for each latency that is predicted, those of which most is expected first."""
        found = zip(points, self._foresee(points), strict=True)
        unlike = {us: (model.guess_us(point, us), point) for point, us in reversed([*found]) if us is not None}
        return [point for _, point in sorted(unlike.values())]

    def _foresee(self, points: Sequence[Point]) -> list[float | None]:
        new = [point for point in dict.fromkeys(points) if point not in self._predicted]
        if new:
            self._predicted.update(zip(new, self._ask([self.parameters(point) for point in new]), strict=True))
        return [self._predicted[point] for point in points]

    def _learn(self, tried: Sequence[Tried]) -> _Learnt | None:
        """What the trials teach; None where none has both a latency and a prediction."""
        self._foresee([each.point for each in tried])
        assert self._model is not None
        found = [(each.told[0], each.point) for each in tried if each.told is not None and each.told[0] is not None]
        known = sorted(each for each in found if self._predicted[each[1]] is not None)[:_LEARNT]
        if not known:
            return None
        where, latencies = [point for _, point in known], np.array([latency_us for latency_us, _ in known])
        at = self._predictions(where)
        pending = [each.point for each in tried if each.told is None and self._predicted[each.point] is not None]
        if pending:
            means, _ = self._model.expect(pending, self._predictions(pending), where, at, latencies)
            where, latencies = [*where, *pending], np.concatenate([latencies, np.exp(means)])
            at = self._predictions(where)
        logs, _ = self._model.expect(where, at, where, at, latencies)
        return _Learnt(where, at, latencies, logs[: len(known)])

    def _improve(self, grid: Grid, points: set[Point], number: int, learnt: _Learnt | None) -> Point:
        """The candidate of the largest expected improvement over the least expected latency of any trial."""
        first = next((point for point in self._firsts[:_FIRST] if point not in points), None)
        if first is not None:
            return first
        if learnt is None:
            return self._anywhere(grid, points)
        centres = [learnt.where[int(index)] for index in np.argsort(learnt.logs, kind="stable")[:_CENTRES]]
        near = [point for centre in centres for point in grid.neighbours(centre)]
        self._foresee(near)
        found = {*near, *self._pairs(grid, learnt, centres[0], points)} - points
        new = sorted(point for point in found if self._predicted[point] is not None)
        if not new:
            return self._anywhere(grid, points)
        gains = self._gains(learnt, new, self._predictions(new))
        seen = {self._predicted[point] for point in points}
        gains *= np.array([_AGAIN if self._predicted[point] in seen else 1.0 for point in new])
        chance = np.random.default_rng((self._seed, number))
        return new[int((gains * chance.uniform(1.0 - _LUCK, 1.0, len(new))).argmax())]

    def _pairs(self, grid: Grid, learnt: _Learnt, centre: Point, points: set[Point]) -> list[Point]:
        """Promising changes of two knobs of the centre, where no change of one may be a gain.

        Until they are predicted, predictions of their two changes stand in.
        """
        ones = [each for each in grid.neighbours(centre) if self._predicted[each] is not None]
        found: dict[Point, float] = {}
        if (base := self._predicted[centre]) is not None and ones:
            promise = self._gains(learnt, ones, self._predictions(ones))
            best = [ones[int(index)] for index in np.argsort(-promise, kind="stable")[:_ONES]]
            for one, other in combinations(best, 2):
                both = tuple(b if a == c else a for a, b, c in zip(one, other, centre, strict=True))
                apart = sum(a != c for a, c in zip(both, centre, strict=True))
                if apart == 2 and both not in points:
                    found[both] = float(np.prod(self._predictions([one, other]))) / base
        if not found:
            return []
        pairs = list(found)
        gains = self._gains(learnt, pairs, np.array(list(found.values())))
        chosen = [pairs[int(index)] for index in np.argsort(-gains, kind="stable")[:_PAIRS]]
        self._foresee(chosen)
        return chosen

    def _gains(self, learnt: _Learnt, points: Sequence[Point], predictions: Array) -> Array:
        """Expected improvements of points over the least expected latency of any trial."""
        assert self._model is not None
        means, deviations = self._model.expect(points, predictions, learnt.where, learnt.at, learnt.latencies)
        return improvement(learnt.logs.min(), means, deviations)

    def _anywhere(self, grid: Grid, points: set[Point]) -> Point:
        """The best start that no trial has; without one, the nearest untried point to the best start."""
        starts = self._firsts or [self.point(start) for start in self._starts]
        return next((point for point in starts if point not in points), untried(grid, starts[0], points))

    def _predictions(self, points: Sequence[Point]) -> Array:
        """Feasible predictions in us."""
        return np.array([self._predicted[point] for point in points], dtype=np.float64)
