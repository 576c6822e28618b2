"""What a measured search expects of schedules: a Gaussian process over its own measurements and those of other works.

The logarithm of a latency is a constant of the campaign, plus a weight times the logarithm of the prediction, plus a
function of the schedule's geometry. Works share most of that function: the more alike they are, the more. So rows of
other works, in coordinates that all works share, say what to expect before the first measurement, and the campaign's
own measurements correct it. The weight on the prediction is learnt from the campaign's own measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from flywheel.search.sampling.gaussian import Array, Grid, Point

_NEAR: Final = 0.3
"""Least distance of two values of an ordered knob, as a fraction of FAR's: one bad value says little of the next."""

_STEP: Final = 0.5
"""Coordinates so far apart are at least _NEAR apart; works cut their tiles at slightly different heights."""

FAR: Final = 3.0
"""Coordinates so far apart, in powers of 2, share nothing."""

_LENGTH, _ADDITIVE = 4.0, 0.5
"""Length scale of the product over knobs, and the share of the sum over knobs."""

_DEVIATION: Final = 0.04
"""Standard deviation of the function that works share, in logarithms of latencies."""

_OWN: Final = 1.0
"""Variance of what each work has on top, as a fraction of that of the shared function."""

_NOISE: Final = 0.003
"""Standard deviation of a measurement, in logarithms: measurements of other minutes and boards differ by so much."""

_CAUTION: Final = 1.0
"""Standard deviations above the mean that a guess lies."""

_KEPT: Final = 4000
"""Points of which what lessons say is kept, at 8 bytes a row of the lessons."""

_LEVEL: Final = 1.0
"""Standard deviation of a campaign's constant: nothing is known of it."""

_WEIGHT, _WEIGHT_SPREAD = 0.5, 0.2
"""What is expected of the weight on predictions, and its standard deviation. Source: results/replay_measured.txt."""

_WARP: Final = 0.1
"""Losses beyond about this fraction of the best count less and less: how bad a bad schedule is teaches little."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The coordinates of a knob's values, which mean the same for all works; without an order, equal or not."""

    values: tuple[float, ...]
    ordered: bool


@dataclass(frozen=True, slots=True, eq=False)
class Lessons:
    """Measurements of other works, for a search of a work whose knobs have these `axes`.

    `starts` are the best schedules of the nearest works, carried over. `places` are coordinates [rows, knobs], of the
    knobs `names`; `losses` [rows] are logarithms of latencies over the best of their campaign; `campaign` [rows] is the
    campaign's index. `likeness` [campaigns] is how much each campaign's work has in common with the one that is
    searched, 0..1, and `between` that of any two.
    """

    starts: tuple[Mapping[str, int | str], ...]
    axes: Mapping[str, Coordinates]
    names: tuple[str, ...]
    places: Array
    losses: Array
    campaign: Array
    likeness: Array
    between: Array


def axes_of(grid: Grid, names: Sequence[str], lessons: Lessons | None) -> dict[str, Coordinates]:
    """The axes of a grid's knobs: those of the lessons, or else indices."""
    if lessons is not None:
        return {name: lessons.axes[name] for name in names}
    axes = {}
    for name, size, ordered in zip(names, grid.sizes, grid.ordered, strict=True):
        axes[name] = Coordinates(tuple(FAR * place / max(size - 1, 1) for place in range(size)), ordered)
    return axes


class Expectation:
    """Expects logarithms of latencies of points, which are indices of the values of `axes`."""

    def __init__(self, axes: Mapping[str, Coordinates], lessons: Lessons | None) -> None:
        names = list(axes)
        self._axes = list(axes.values())
        self._offsets = np.concatenate([[0], np.cumsum([len(axis.values) for axis in self._axes])]).astype(int)
        self._count = max(1, len(names) if lessons is None else len(lessons.names))
        width = int(self._offsets[-1])
        self._apart, self._alike = np.zeros((2, width, width))
        for at, axis in zip(self._offsets, self._axes, strict=False):
            each = slice(at, at + len(axis.values))
            gaps = _gaps(np.array(axis.values), np.array(axis.values), axis.ordered)
            self._apart[each, each], self._alike[each, each] = gaps, np.exp(-2.0 * gaps) / self._count
        self._base = (self._count - len(names)) / self._count  # knobs that this work does not search are alike
        self._known: dict[Point, tuple[float, Array]] = {}
        self._lessons = lessons
        if lessons is not None:
            self._teach(names, lessons)

    def prior(self, points: Sequence[Point]) -> Array:
        """What other works say of the points' losses, [points]; 0 for each where there are no lessons."""
        known = self._shared(points)
        return np.array([known[point][0] for point in points])

    def guess_us(self, point: Point, predicted_us: float) -> float:
        """A point's latency before anything of its work was measured, but for a factor that all points share.

        It is a cautious guess: the best of many would else be the one that is known least.
        """
        if self._lessons is None:
            return predicted_us
        said, facts = self._shared([point])[point]
        deviation = np.sqrt(max(_DEVIATION**2 * (1.0 + _OWN) - float(facts @ facts), 0.0))
        return float(np.exp(said + _CAUTION * deviation) * predicted_us**_WEIGHT)

    def expect(
        self, points: Sequence[Point], predictions: Array, where: Sequence[Point], at: Array, latencies_us: Array
    ) -> tuple[Array, Array]:
        """(means, standard deviations) of logarithms of the latencies of points, [points].

        `predictions` are those of the points in us. Latencies were measured `where` the predictions are `at`.
        """
        logs = np.log(predictions)
        start = float(logs.min()) if not len(at) else float(np.log(at).min())
        lean, mean = _drawn(logs - start), self.prior(points) + _WEIGHT * _drawn(logs - start)
        taught = self._facts(points)
        spread = _DEVIATION**2 * (1.0 + _OWN) - (taught**2).sum(axis=1) + (_WEIGHT_SPREAD * lean) ** 2
        if not len(where):
            return mean, np.sqrt(np.maximum(spread, 1e-12))
        own, owned = _drawn(np.log(at) - start), self._facts(where)
        targets = warped(np.log(latencies_us)) - self.prior(where) - _WEIGHT * own
        level = float(targets.mean())

        def covariance(one: Sequence[Point], facts: Array, leans: Array) -> Array:
            shared = _DEVIATION**2 * (1.0 + _OWN) * self._kernel(self._hot(one), self._hot(where))
            found: Array = shared - facts @ owned.T + _WEIGHT_SPREAD**2 * np.outer(leans, own) + _LEVEL**2
            return found

        inner = np.linalg.inv(covariance(where, owned, own) + _NOISE**2 * np.eye(len(where)))
        cross = covariance(points, taught, lean)
        means = mean + level + cross @ (inner @ (targets - level))
        variance = spread + _LEVEL**2 - ((cross @ inner) * cross).sum(axis=1)
        return means, np.sqrt(np.maximum(variance, 1e-12))

    def _teach(self, names: Sequence[str], lessons: Lessons) -> None:
        """Tables [values of all knobs, rows], and the lessons' own covariance."""
        rows, alike = len(lessons.losses), np.zeros((len(lessons.losses),) * 2)
        apart = np.zeros((rows, rows))
        self._far, self._like = np.zeros((2, int(self._offsets[-1]), rows))
        self._fixed = np.zeros((2, rows))
        at = dict(zip(names, self._offsets, strict=False))
        for knob, name in enumerate(lessons.names):
            places, axis = lessons.places[:, knob], dict(zip(names, self._axes, strict=True)).get(name)
            ordered = axis.ordered if axis is not None else True
            unique, index = np.unique(places, return_inverse=True)
            gaps = _gaps(unique, unique, ordered)
            apart += gaps[index][:, index]
            alike += np.exp(-2.0 * gaps)[index][:, index] / self._count
            if axis is not None:
                gaps = _gaps(np.array(axis.values), unique, ordered)[:, index]
                each = slice(at[name], at[name] + len(axis.values))
                self._far[each], self._like[each] = gaps, np.exp(-2.0 * gaps) / self._count
            else:
                gap = _gaps(np.array(lessons.axes[name].values[:1]), places, True)[0]
                self._fixed += np.array([gap, np.exp(-2.0 * gap) / self._count])
        kernel = _ADDITIVE * alike + (1.0 - _ADDITIVE) * np.exp(apart / -_LENGTH)
        same = lessons.campaign[:, None] == lessons.campaign[None, :]
        shared = lessons.between[lessons.campaign][:, lessons.campaign] + _OWN * same
        covariance = _DEVIATION**2 * kernel * shared + _LEVEL**2 * same + _NOISE**2 * np.eye(rows)
        self._root = np.linalg.inv(np.linalg.cholesky(covariance))
        self._said = self._root @ (lessons.losses - np.median(lessons.losses))
        self._liked = _DEVIATION**2 * lessons.likeness[lessons.campaign]

    def _shared(self, points: Sequence[Point]) -> dict[Point, tuple[float, Array]]:
        """Of each point: what lessons say of it, and its row of the matrix whose products are what they explain."""
        new = [point for point in dict.fromkeys(points) if point not in self._known]
        if len(self._known) + len(new) > _KEPT:
            self._known, new = {}, [*dict.fromkeys(points)]
        if new and self._lessons is None:
            self._known |= {point: (0.0, np.zeros(1)) for point in new}
        elif new:
            hot = self._hot(new)
            kernel = _ADDITIVE * (hot @ self._like + self._fixed[1])
            kernel += (1.0 - _ADDITIVE) * np.exp((hot @ self._far + self._fixed[0]) / -_LENGTH)
            facts = (kernel * self._liked) @ self._root.T
            self._known |= zip(new, zip(facts @ self._said, facts, strict=True), strict=True)
        return self._known

    def _facts(self, points: Sequence[Point]) -> Array:
        known = self._shared(points)
        return np.array([known[point][1] for point in points])

    def _kernel(self, one: Array, other: Array) -> Array:
        kernel: Array = (1.0 - _ADDITIVE) * np.exp((one @ self._apart @ other.T) / -_LENGTH)
        kernel += _ADDITIVE * (one @ self._alike @ other.T + self._base)
        return kernel

    def _hot(self, points: Sequence[Point]) -> Array:
        hot = np.zeros((len(points), int(self._offsets[-1])))
        hot[np.arange(len(points))[:, None], np.array(points) + self._offsets[:-1]] = 1.0
        return hot


def warped(logs: Array) -> Array:
    """Logarithms of latencies, of which those far above the least are drawn nearer."""
    found: Array = logs.min() + _drawn(logs - logs.min())
    return found


def _drawn(losses: Array) -> Array:
    """Losses, those beyond _WARP less and less; gains stay."""
    found: Array = np.where(losses > 0.0, _WARP * np.log1p(np.maximum(losses, 0.0) / _WARP), losses)
    return found


def _gaps(one: Array, other: Array, ordered: bool) -> Array:
    """Distances [one, other] of a knob's coordinates, each at most 1. Of an unknown coordinate it is 1."""
    steps = np.abs(one[:, None] - other[None, :])
    near = _NEAR * np.minimum(steps / _STEP, 1.0) + (1.0 - _NEAR) * np.minimum(steps / FAR, 1.0)
    found: Array = np.nan_to_num(near if ordered else 1.0 * (steps > 0), nan=1.0)
    return found
