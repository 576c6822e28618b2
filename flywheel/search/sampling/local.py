"""Search around the best trials, led by a Gaussian process. It suits a start that is nearly good, where TPE is weak.

The sampler first surveys the best start, one knob at a time. A knob that only ever changes together with others is
judged by theirs: a value that came by chance with a good trial would then look good itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flywheel.search.sampling.gaussian import GaussianProcess, Grid, Point, untried
from flywheel.search.sampling.gridded import GridSampler, Observation, Tried

FIRST: Final = 2
"""Feasible trials before the Gaussian process proposes; until then, proposals lie far from all tried points."""

_STARTS: Final = 3
"""Number of first feasible trials. The best of them is surveyed: every single step of a knob from it is tried."""

_LEARNT: Final = 200
"""Best trials that the Gaussian process is fitted to."""

_CENTRES: Final = 3
"""Best trials, whose neighbours are candidates."""

_JUMPS: Final = 200
"""Random candidates that differ from a centre in up to three knobs."""

_CLIMB: Final = 5
"""Steps from the best candidate uphill in expected improvement."""

_LUCK: Final = 0.3
"""Share of an expected improvement that is random, so that coordinators of one campaign, each with its own seed,
propose different points."""

_NEAR: Final = 0.03
"""Fraction of the best latency: smaller differences from the best count almost in full, larger ones less and less."""


class LocalSampler(GridSampler):
    """Proposes single steps from the best start, then what is most likely to beat the best trial.

    Candidates for the latter differ from good points in a few knobs. The sampler expects of a failed trial, and of one
    under way, what its neighbours suggest. A proposal depends only on the seed and the study's trials. No point,
    finished or under way, is proposed twice before all are tried.
    """

    def propose(self, grid: Grid, tried: Sequence[Tried], number: int) -> Point:
        """The point to try next."""
        told = [each.told for each in tried if each.told is not None]
        pending = [each.point for each in tried if each.told is None]
        return propose(grid, told, pending, np.random.default_rng((self._seed, number)))


def propose(
    grid: Grid, told: Sequence[Observation], pending: Sequence[Point], chance: np.random.Generator
) -> Point:
    """The point to try next; `told` are latencies in us, None where infeasible."""
    tried = {point for _, point in told} | set(pending)
    feasible = [value for value, _ in told if value is not None]
    if len(feasible) < FIRST:
        points = [_anywhere(grid, chance) for _ in range(30)]
        gaps = grid.distances(points, sorted(tried)).min(axis=1) if tried else np.zeros(30)
        drawn = points[int(gaps.argmax())]
        return drawn if drawn not in tried else untried(grid, drawn, tried)
    worst = max(feasible)
    ranked = sorted((worst if value is None else value, value is None, point) for value, point in told)[:_LEARNT]
    points = [point for _, _, point in ranked]
    model = GaussianProcess(grid, points, _warped([value for value, _, _ in ranked]), pending)
    possible = [index for index, (_, infeasible, _) in enumerate(ranked) if not infeasible]
    survey = [point for point in grid.steps(_start(told)) if point not in tried]
    if survey:
        gains = model.improvement(survey) * chance.uniform(1.0 - _LUCK, 1.0, len(survey))
        return survey[int(gains.argmax())]
    centres = [points[index] for index in sorted(possible, key=lambda index: (model.means[index], index))[:_CENTRES]]
    near = {point for centre in centres for point in grid.neighbours(centre)}
    near |= set(_jumps(grid, [centres[index % len(centres)] for index in range(_JUMPS)], chance))
    new = sorted(near - tried)
    if not new:
        return untried(grid, centres[0], tried)
    candidates = [new[index] for index in chance.permutation(len(new))]  # random: equals get equal chances
    return _climb(grid, model, candidates, tried, chance)


def _warped(latencies_us: list[float]) -> NDArray[np.float64]:
    """Targets for the Gaussian process: nearly logarithmic close to the best, compressed more and more above."""
    warped: NDArray[np.float64] = np.log1p(np.log(np.array(latencies_us) / min(latencies_us)) / _NEAR)
    return warped


def _start(told: Sequence[Observation]) -> Point:
    """The best of the first feasible points."""
    first = [(value, point) for value, point in told if value is not None][:_STARTS]
    return min(first)[1]


def _climb(
    grid: Grid, model: GaussianProcess, candidates: list[Point], tried: set[Point], chance: np.random.Generator
) -> Point:
    """The untried point of the largest expected improvement: the best candidate, then a climb over its neighbours."""
    best, most = candidates[0], -1.0
    for _ in range(_CLIMB + 1):
        gains = model.improvement(candidates) * chance.uniform(1.0 - _LUCK, 1.0, len(candidates))
        if gains.max() <= most:
            break
        best, most = candidates[int(gains.argmax())], float(gains.max())
        candidates = [point for point in grid.neighbours(best) if point not in tried]
        if not candidates:
            break
    return best


def _jumps(grid: Grid, points: Sequence[Point], chance: np.random.Generator) -> list[Point]:
    """Each point with other values in two or three random knobs; a knob may be drawn more than once."""
    jumped, sizes = np.array(points), np.array(grid.sizes)
    knobs = chance.integers(len(sizes), size=(3, len(points)))
    steps = 1 + chance.integers(np.maximum(sizes[knobs] - 1, 1))
    steps[2, chance.random(len(points)) < 0.5] = 0
    every = np.arange(len(points))
    for knob, step in zip(knobs, steps, strict=True):
        jumped[every, knob] = (jumped[every, knob] + step) % sizes[knob]
    return list(map(tuple, jumped.tolist()))


def _anywhere(grid: Grid, chance: np.random.Generator) -> Point:
    return tuple(int(chance.integers(size)) for size in grid.sizes)
