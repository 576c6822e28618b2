"""Fits a machine's constants to measured programs.

A fit moves the constants of FREE, each within physically sensible bounds, until predictions agree with measurements. It
is Levenberg-Marquardt on the logarithm of predicted over measured latency. A weak prior keeps constants that the
programs cannot determine near their start. The same samples give the same constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.cost_model.demand import Demand
from flywheel.cost_model.machine import FREE, Free, Machine
from flywheel.cost_model.predict import latency_us

Array = npt.NDArray[np.float64]

_WIDE: Final = 20.0
"""Bounds that differ by more than this factor are searched by their logarithm."""

_PRIOR: Final = 0.01
"""Error in the log latency that weighs as much as moving a constant through its whole range."""

_OUTLIER: Final = 0.02
"""Smallest error in the log latency above which errors count less; the median error if that is larger."""

_STEP: Final = 0.02
_ROUNDS: Final = 40
_FRESH: Final = 8
"""Steps after which derivatives are computed again."""
_ENOUGH: Final = 5e-3
"""Share of the cost that a step from new derivatives must gain, or the fit ends."""
_MOST_DAMPING: Final = 1e4


@dataclass(frozen=True, slots=True)
class Sample:
    """A program's demand, its measured latency, and its weight floor `floor_us`.

    Since all layers are alike, two short programs may stand for a long one. `demand` is then of a program with some of
    the layers, and `longer` of one with more. The whole program takes the time of the first plus `more` times the
    difference of the two.
    """

    demand: Demand
    floor_us: float
    latency_us: float
    longer: Demand | None = None
    more: float = 0.0

    def predicted_us(self, machine: Machine) -> float:
        """The predicted latency on `machine`."""
        if self.longer is None:
            return latency_us(self.demand, machine, self.floor_us)
        short, long = (latency_us(demand, machine, 0.0) for demand in (self.demand, self.longer))
        return max(self.floor_us, short + self.more * (long - short))


@dataclass(frozen=True, slots=True)
class Score:
    """How well predictions agree with measurements of `n` configs. Errors are absolute, relative to the measured
    latency.

    `spearman` is None if ranks say nothing: with fewer than two configs, or if all values are equal.
    """

    n: int
    spearman: float | None
    median_error: float
    p90_error: float


def score(predicted_us: Sequence[float], measured_us: Sequence[float]) -> Score:
    """Compare predictions with measurements, one or more of each."""
    predicted, measured = np.asarray(predicted_us), np.asarray(measured_us)
    errors = np.abs(predicted / measured - 1)
    mine, theirs = _ranks(predicted), _ranks(measured)
    alike = np.ptp(mine) == 0 or np.ptp(theirs) == 0
    spearman = None if alike else float(np.corrcoef(mine, theirs)[0, 1])
    return Score(len(measured), spearman, float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _ranks(values: Array) -> Array:
    """Ranks from 0; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2)[group], dtype=np.float64)


PriceSamples = Callable[[Sequence[Machine]], Sequence[Sequence[float]]]
"""Machines -> for each, the predicted latency of every sample in us."""


def price_here(samples: Sequence[Sample]) -> PriceSamples:
    """Prices samples in this process."""
    return lambda machines: [[sample.predicted_us(machine) for sample in samples] for machine in machines]


def fit(
    machine: Machine,
    measured_us: Sequence[float],
    price: PriceSamples,
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    watch: Callable[[float], None] = lambda _: None,
    only: Sequence[str] = (),
) -> Machine:
    """`machine` with the constants of FREE, or `only` those named, moved to the best agreement of prices and measured
    latencies.

    `bounds` maps names to (low, high) that replace FREE's. `watch` gets the root mean square error of the logarithm
    after every step. Raises ValueError where `only` names none of FREE.
    """
    moved = [each for each in FREE if not only or each.name in only]
    if not moved:
        raise ValueError(f"a fit moves no constant named {', '.join(only)}")
    free = [Free(each.name, *bounds.get(each.name, (each.low, each.high))) for each in moved]
    scales = [_Scale(each, _get(machine, each.name)) for each in free]

    def build(place: Array) -> Machine:
        built = machine
        for scale, at in zip(scales, place, strict=True):
            built = _set(built, scale.name, scale.value(float(at)))
        return built

    begin = np.array([scale.begin for scale in scales])
    count, measured = len(measured_us), np.log(measured_us)

    def residuals(places: Sequence[Array]) -> Array:
        errors = np.log(price([build(place) for place in places])) - measured
        return np.hstack([errors, (np.stack(places) - begin) * (_PRIOR * count**0.5)])

    place = _descend(residuals, begin, lambda found: watch(float(np.sqrt(np.mean(found[:count] ** 2)))))
    return replace(build(place), source="calibrated")


class _Scale:
    """A constant as a number from 0 to 1 between its bounds."""

    def __init__(self, free: Free, value: float) -> None:
        self.name = free.name
        self._low, self._high, self._start = free.low, free.high, value
        self._log = free.low > 0 and free.high / free.low > _WIDE
        inside = min(max(value, free.low), free.high)
        span = np.log([free.low, inside, free.high]) if self._log else np.array([free.low, inside, free.high])
        self.begin = float((span[1] - span[0]) / (span[2] - span[0]))

    def value(self, place: float) -> float:
        """The constant at a place. At the fit's first place it is exactly the initial value."""
        if place == self.begin:
            return self._start
        if self._log:
            return float(self._low * (self._high / self._low) ** place)
        return self._low + (self._high - self._low) * place


def _descend(
    residuals: Callable[[Sequence[Array]], Array], place: Array, watch: Callable[[Array], None]
) -> Array:
    """Levenberg-Marquardt within 0..1. Derivatives are finite differences, kept up to date by Broyden's rule in
    between.

    `residuals` returns a row for each point.
    """
    found = residuals([place])[0]
    usual = _usual(found)
    cost, damping, age = _cost(found, usual), 1e-2, 0
    slopes = _slopes(residuals, place, found)
    for _ in range(_ROUNDS):
        weights = _weights(found, usual)
        held = _held(place, slopes.T @ (weights * found))
        normal = slopes.T @ (weights[:, None] * slopes)
        normal += damping * np.diag(np.diag(normal))
        normal[held, :] = normal[:, held] = 0.0
        normal[held, held] = 1.0
        pull = np.where(held, 0.0, -(slopes.T @ (weights * found)))
        tried = np.clip(place + np.linalg.solve(normal, pull), 0.0, 1.0)
        there = residuals([tried])[0]
        gain = cost - _cost(there, usual)
        step = tried - place
        if gain > 0:
            slopes += np.outer(there - found - slopes @ step, step) / max(float(step @ step), 1e-12)
            place, found, cost, damping, age = tried, there, cost - gain, damping / 3, age + 1
            watch(found)
            if gain > _ENOUGH * cost and age < _FRESH:
                continue
            if gain <= _ENOUGH * cost and age == 1:
                break
        elif age == 0:
            damping *= 8
            if damping > _MOST_DAMPING:
                break
            continue
        slopes, age, usual = _slopes(residuals, place, found), 0, _usual(found)
        cost = _cost(found, usual)
    return place


def _usual(found: Array) -> float:
    """The median absolute residual, or _OUTLIER if that is larger."""
    return max(_OUTLIER, float(np.median(np.abs(found))))


def _weights(found: Array, usual: float) -> Array:
    """Weights of the squared errors."""
    return np.asarray(1.0 / (1.0 + (found / usual) ** 2))


def _cost(found: Array, usual: float) -> float:
    """Cauchy's cost: errors below `usual` count by their squares. Larger errors count by their logarithm, since there
    the model is wrong and no constant is to blame."""
    return float(np.sum(usual**2 * np.log1p((found / usual) ** 2)))


def _held(place: Array, gradient: Array) -> npt.NDArray[np.bool_]:
    """Which constants are at a bound and would move beyond it."""
    return np.asarray(((place <= 0.0) & (gradient > 0.0)) | ((place >= 1.0) & (gradient < 0.0)))


def _slopes(residuals: Callable[[Sequence[Array]], Array], place: Array, found: Array) -> Array:
    steps = np.where(place + _STEP <= 1.0, _STEP, -_STEP)
    moved = residuals([place + step for step in np.diag(steps)])
    return np.asarray(((moved - found) / steps[:, None]).T)


def _get(machine: Machine, name: str) -> float:
    part, _, field = name.rpartition(".")
    value: float = getattr(getattr(machine, part) if part else machine, field)
    return value


def _set(machine: Machine, name: str, value: float) -> Machine:
    part, _, field = name.rpartition(".")
    changes: dict[str, Any] = {field: value}
    return replace(machine, **({part: replace(getattr(machine, part), **changes)} if part else changes))
