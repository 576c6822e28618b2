"""Search around the best trials, led by a Gaussian process: what TPE lacks from a start that is nearly good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, pi, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

Point = tuple[int, ...]
"""Of each knob the index of its value, in the order of the knobs' names."""

Array = NDArray[np.float64]

_FIRST: Final = 2
"""Feasible trials before the model is asked; until then, points far from all others."""

_LEARNT: Final = 200
"""Best trials that the model is made of."""

_CENTRES: Final = 3
"""Trials whose neighbours are candidates."""

_JUMPS: Final = 200
"""Candidates that differ from a centre in two or three knobs."""

_CLIMB: Final = 5
"""Steps from the best candidate uphill in expected improvement."""

_NEAR: Final = 0.03
"""Of the best latency: differences well below count in full, those above less and less."""

_LENGTHS: Final = (1.0, 3.0, 10.0, 30.0)
_ADDITIVE: Final = (0.0, 0.5)
_NOISES: Final = (1e-4, 1e-2, 1e-1)
"""What the likelihood chooses from: length scales, the kernel's additive part, the noise's share of the variance."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values a knob has and whether they are in order, knob by knob."""

    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    def neighbours(self, point: Point) -> list[Point]:
        """Points that differ in one knob: by one step where its values are in order, by any where they are not."""
        return [
            (*point[:knob], value, *point[knob + 1 :])
            for knob, size in enumerate(self.sizes)
            for value in range(size)
            if value != point[knob] and (not self.ordered[knob] or abs(value - point[knob]) == 1)
        ]

    def distances(self, points: Sequence[Point], others: Sequence[Point]) -> Array:
        """[points, others, knobs], each at most 1."""
        steps = np.abs(np.array(points)[:, None, :] - np.array(others)[None, :, :])
        ends = np.maximum(np.array(self.sizes) - 1, 1)
        return np.where(self.ordered, steps / ends, steps > 0).astype(np.float64)


class Model:
    """A Gaussian process over a grid; `values` are latencies in us, and what it says of points is in its own unit."""

    def __init__(self, grid: Grid, points: Sequence[Point], values: Sequence[float], pending: Sequence[Point]) -> None:
        self._grid, self._points = grid, list(points)
        low = min(values)
        warped = np.log1p(np.log(np.array(values) / low) / _NEAR)
        self._y = (warped - warped.mean()) / (warped.std() or 1.0)
        apart = grid.distances(points, points)
        fits = [(length, part, noise) for length in _LENGTHS for part in _ADDITIVE for noise in _NOISES]
        self._fit = min(fits, key=lambda fit: self._misfit(apart, fit))
        self._factor(apart)
        self.means = self.predict(self._points)[0]
        if pending:  # what is under way will turn out as expected: then there is less to learn near it
            self._y = np.concatenate([self._y, self.predict(pending)[0]])
            self._points += pending
            self._factor(grid.distances(self._points, self._points))

    def predict(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Mean and standard deviation at each point."""
        cross = _kernel(self._grid.distances(points, self._points), *self._fit[:2])
        solved = np.linalg.solve(self._root, cross.T)
        variance = np.maximum(1.0 - (solved**2).sum(axis=0), 1e-12) * self._scale
        return cross @ self._weights, np.sqrt(variance)

    def improvement(self, points: Sequence[Point]) -> Array:
        """Expected improvement of each point over the best mean of the known ones, whose values are noisy."""
        mean, deviation = self.predict(points)
        z = (self.means.min() - mean) / deviation
        below = np.array([0.5 * (1.0 + erf(value / sqrt(2.0))) for value in z])
        return deviation * (z * below + np.exp(-z * z / 2.0) / sqrt(2.0 * pi))

    def _factor(self, apart: Array) -> None:
        length, part, noise = self._fit
        self._root = np.linalg.cholesky(_kernel(apart, length, part) + noise * np.eye(len(apart)))
        solved = np.linalg.solve(self._root, self._y)
        self._scale = max(float(solved @ solved) / len(solved), 1e-6)
        self._weights = np.linalg.solve(self._root.T, solved)

    def _misfit(self, apart: Array, fit: tuple[float, float, float]) -> float:
        """Negative log marginal likelihood, at the best scale."""
        length, part, noise = fit
        root = np.linalg.cholesky(_kernel(apart, length, part) + noise * np.eye(len(apart)))
        solved = np.linalg.solve(root, self._y)
        scale = max(float(solved @ solved) / len(solved), 1e-6)
        return float(0.5 * len(solved) * np.log(scale) + np.log(np.diag(root)).sum())


def _kernel(apart: Array, length: float, part: float) -> Array:
    """Of distances [.., .., knobs]: `part` of it additive, a sum over knobs, the rest a product."""
    return part * np.exp(-2.0 * apart).mean(axis=-1) + (1.0 - part) * np.exp(-apart.sum(axis=-1) / length)


class LocalSampler(BaseSampler):
    """Proposes what is most likely to beat the best trial, among points that differ from good ones in a few knobs.

    What it proposes depends on the seed and the study's trials alone. It proposes no point twice, be it finished or
    under way, before all are tried.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = RandomSampler(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The knobs of the trials so far; before there are any, each is sampled for itself."""
        known = next((other for other in _others(study, trial) if other.distributions), None)
        return {} if known is None else dict(sorted(known.distributions.items()))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value of the very first point."""
        return self._first.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A point."""
        if not search_space:
            return {}
        values = [_values(distribution) for distribution in search_space.values()]
        grid = Grid(
            tuple(map(len, values)), tuple(isinstance(knob, IntDistribution) for knob in search_space.values())
        )
        told: list[tuple[float | None, Point]] = []
        pending: list[Point] = []
        for other in _others(study, trial):
            if other.params.keys() != search_space.keys():
                continue
            point = tuple(value.index(other.params[name]) for name, value in zip(search_space, values, strict=True))
            if other.state is TrialState.RUNNING:
                pending.append(point)
            else:
                told.append((_feasible(other), point))
        chance = np.random.default_rng((self._seed, trial.number))
        chosen = propose(grid, told, pending, chance)
        return {name: value[index] for name, value, index in zip(search_space, values, chosen, strict=True)}


def propose(
    grid: Grid, told: Sequence[tuple[float | None, Point]], pending: Sequence[Point], chance: np.random.Generator
) -> Point:
    """The point to try next; `told` are latencies in us, None where infeasible."""
    tried = {point for _, point in told} | set(pending)
    feasible = [value for value, _ in told if value is not None]
    if len(feasible) < _FIRST:
        points = [_anywhere(grid, chance) for _ in range(30)]
        gaps = grid.distances(points, sorted(tried)).sum(axis=2).min(axis=1) if tried else np.zeros(30)
        drawn = points[int(gaps.argmax())]
        return drawn if drawn not in tried else _untried(grid, drawn, tried)
    worst = max(feasible)
    ranked = sorted((worst if value is None else value, value is None, point) for value, point in told)[:_LEARNT]
    points = [point for _, _, point in ranked]
    model = Model(grid, points, [value for value, _, _ in ranked], pending)
    possible = [index for index, (_, infeasible, _) in enumerate(ranked) if not infeasible]
    centres = [points[index] for index in sorted(possible, key=lambda index: (model.means[index], index))[:_CENTRES]]
    near = {point for centre in centres for point in grid.neighbours(centre)}
    near |= {_jump(grid, centres[index % len(centres)], chance) for index in range(_JUMPS)}
    untried = sorted(near - tried)
    if not untried:
        return _untried(grid, centres[0], tried)
    candidates = [untried[index] for index in chance.permutation(len(untried))]  # among equals, any
    return _climb(grid, model, candidates, tried)


def _climb(grid: Grid, model: Model, candidates: list[Point], tried: set[Point]) -> Point:
    """The untried point of the largest expected improvement, among candidates and then uphill from the best."""
    best, most = candidates[0], -1.0
    for _ in range(_CLIMB + 1):
        gains = model.improvement(candidates)
        if gains.max() <= most:
            break
        best, most = candidates[int(gains.argmax())], float(gains.max())
        candidates = [point for point in grid.neighbours(best) if point not in tried]
        if not candidates:
            break
    return best


def _jump(grid: Grid, point: Point, chance: np.random.Generator) -> Point:
    """Two or three times a neighbour."""
    for _ in range(int(chance.integers(2, 4))):
        near = grid.neighbours(point)
        point = near[int(chance.integers(len(near)))]
    return point


def _anywhere(grid: Grid, chance: np.random.Generator) -> Point:
    return tuple(int(chance.integers(size)) for size in grid.sizes)


def _untried(grid: Grid, start: Point, tried: set[Point]) -> Point:
    """The untried point that is the fewest steps away; `start` itself where all are tried."""
    ring, seen = [start], {start}
    while ring:
        around = [near for point in ring for near in grid.neighbours(point)]
        found = next((point for point in around if point not in tried), None)
        if found is not None:
            return found
        ring = [point for point in dict.fromkeys(around) if point not in seen]
        seen.update(ring)
    return start


def _others(study: Study, trial: FrozenTrial) -> list[FrozenTrial]:
    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    return [other for other in study.get_trials(deepcopy=False, states=states) if other.number != trial.number]


def _values(distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution)
    return range(distribution.low, distribution.high + 1)


def _feasible(trial: FrozenTrial) -> float | None:
    """Latency in us, or None where the trial has none of its own."""
    broken = any(excess > 0 for excess in trial.constraints.values())
    return None if trial.state is not TrialState.COMPLETE or broken else trial.value
