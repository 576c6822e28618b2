"""A Gaussian process over the values of knobs: fitted to some hundred points, asked about many more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import erf, pi, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Point = tuple[int, ...]
"""The index of each knob's value, in the order of the knobs' names."""

Array = NDArray[np.floating[Any]]

Fit = tuple[float, float, float]
"""(length scale, additive part of the kernel, noise's share of the variance)."""

_APART: Final = 0.3
"""Least distance of two values of an ordered knob, as a fraction of the distance of its ends: one bad value says little
of the next."""

_LENGTHS: Final = (1.0, 3.0, 10.0, 30.0)
_ADDITIVE: Final = (0.0, 0.5)
_NOISES: Final = (1e-4, 1e-2, 1e-1)
"""The lengths, additive parts and noises from which the likelihood chooses a Fit."""


@dataclass(frozen=True, slots=True)
class Grid:
    """For each knob, the number of its values and whether they are in order."""

    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    def beside(self, point: Point, knob: int) -> list[Point]:
        """All points that differ from `point` in this knob only, by any distance: a good value may follow a bad one."""
        return [(*point[:knob], value, *point[knob + 1 :]) for value in range(self.sizes[knob]) if value != point[knob]]

    def neighbours(self, point: Point) -> list[Point]:
        """Points that differ in one knob."""
        return [near for knob in range(len(point)) for near in self.beside(point, knob)]

    def steps(self, point: Point) -> list[Point]:
        """The neighbours one step away. In a knob whose values have no order, every other value is one step away."""
        return [
            near
            for knob, ordered in enumerate(self.ordered)
            for near in self.beside(point, knob)
            if not ordered or abs(near[knob] - point[knob]) == 1
        ]

    def distances(self, points: Sequence[Point], others: Sequence[Point]) -> Array:
        """Distances [points, others]: sums over knobs, each of which adds at most 1."""
        tables = _tables(self)
        distances: Array = tables.one_hot(points) @ (tables.apart @ tables.one_hot(others).T)
        return distances


def untried(grid: Grid, start: Point, tried: set[Point]) -> Point:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Distances and similarities between a grid's values, each [values of all knobs, values of all knobs].

    Entries between values of two knobs are 0. Two matrix products with one-hot points turn them into those of points.
    """

    offsets: NDArray[np.int64]
    apart: Array
    alike: Array

    def one_hot(self, points: Sequence[Point]) -> Array:
        """[points, values of all knobs]"""
        hot = np.zeros((len(points), len(self.apart)))
        hot[np.arange(len(points))[:, None], np.array(points) + self.offsets] = 1.0
        return hot


@lru_cache(maxsize=4)
def _tables(grid: Grid) -> _Tables:
    offsets = np.concatenate([[0], np.cumsum(grid.sizes)])
    apart, alike = np.zeros((2, offsets[-1], offsets[-1]))
    for first, size, ordered in zip(offsets, grid.sizes, grid.ordered, strict=False):
        steps = np.abs(np.arange(size)[:, None] - np.arange(size)[None, :])
        near = _APART * (steps > 0) + (1.0 - _APART) * steps / max(size - 1, 1)
        knob = slice(first, first + size)
        apart[knob, knob] = near if ordered else steps > 0
        alike[knob, knob] = np.exp(-2.0 * apart[knob, knob]) / len(grid.sizes)
    return _Tables(offsets[:-1], apart, alike)


class GaussianProcess:
    """A Gaussian process fitted to targets at points of a grid. Its outputs are in standard deviations from their mean.

    The kernel is a weighted mix of a sum and a product over knobs. The maximum likelihood sets the mix, the length
    scale and the noise. `pending` points count as if they will turn out as expected, so less is to be learnt near them.
    """

    def __init__(
        self, grid: Grid, points: Sequence[Point], targets: Array, pending: Sequence[Point] = ()
    ) -> None:
        self._tables = _tables(grid)
        self.mean, self.unit = float(targets.mean()), float(targets.std() or 1.0)
        scaled = (targets - self.mean) / self.unit
        self._place(points)
        self._fit = self._likeliest(scaled)
        self._learn(scaled)
        self.means = self.predict(points)[0]
        if pending:
            scaled = np.concatenate([scaled, self.predict(pending)[0]])
            self._place([*points, *pending])
            self._learn(scaled)

    def predict(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """(means, standard deviations), each [points]."""
        hot = self._tables.one_hot(points)
        length, part, _ = self._fit
        cross = part * (hot @ self._alike) + (1.0 - part) * np.exp((hot @ self._apart) / -length)
        variance = np.maximum(1.0 - ((cross @ self._inverse) * cross).sum(axis=1), 1e-12) * self._scale
        return cross @ self._weights, np.sqrt(variance)

    def improvement(self, points: Sequence[Point]) -> Array:
        """Expected improvements over the least mean at known points, [points]. Means, since targets are noisy."""
        return improvement(self.means.min(), *self.predict(points))

    def _place(self, points: Sequence[Point]) -> None:
        self._hot = self._tables.one_hot(points)
        self._apart = self._tables.apart @ self._hot.T
        self._alike = self._tables.alike @ self._hot.T

    def _likeliest(self, targets: Array) -> Fit:
        """The Fit with the least negative log marginal likelihood.

        The targets are the last row of the matrix that it factors, so the last row of the Cholesky factor is the
        solution for them.
        """
        count, chosen = len(targets), (float("inf"), (0.0, 0.0, 0.0))
        distances, alike, each = self._hot @ self._apart, self._hot @ self._alike, np.arange(len(targets))
        bordered = np.zeros((count + 1, count + 1))
        for length in _LENGTHS:
            product = np.exp(distances / -length)
            for part in _ADDITIVE:
                kernel = part * alike + (1.0 - part) * product
                for noise in _NOISES:
                    bordered[:count, :count] = kernel
                    bordered[each, each] += noise
                    bordered[count, :count] = targets
                    bordered[count, count] = 1e9  # large enough for any targets
                    root = np.linalg.cholesky(bordered)
                    scale = _scale(float(root[count, :count] @ root[count, :count]), count)
                    misfit = float(0.5 * count * np.log(scale) + np.log(np.diag(root)[:count]).sum())
                    chosen = min(chosen, (misfit, (length, part, noise)))
        return chosen[1]

    def _learn(self, targets: Array) -> None:
        length, part, noise = self._fit
        kernel = part * (self._hot @ self._alike) + (1.0 - part) * np.exp((self._hot @ self._apart) / -length)
        self._inverse = np.linalg.inv(kernel + noise * np.eye(len(targets)))
        self._weights = self._inverse @ targets
        self._scale = _scale(float(targets @ self._weights), len(targets))


def improvement(least: float | Array, mean: Array, deviation: Array) -> Array:
    """The expected improvement below `least`, in the unit of `mean` and `deviation`."""
    z = (least - mean) / deviation
    below = np.array([0.5 * (1.0 + erf(value / sqrt(2.0))) for value in z])
    gain: Array = deviation * (z * below + np.exp(-z * z / 2.0) / sqrt(2.0 * pi))
    return gain


def _scale(explained: float, count: int) -> float:
    """The maximum-likelihood variance of the signal that the kernel describes."""
    return max(explained / count, 1e-6)
