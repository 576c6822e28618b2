from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from flywheel.search.sampling.gaussian import GaussianProcess, Grid, Point, improvement

GRID = Grid((2, 3, 5, 7, 3, 4), (False, True, True, True, False, True))


def draw(count: int, seed: int) -> list[Point]:
    chance = np.random.default_rng(seed)
    drawn = [tuple(int(chance.integers(size)) for size in GRID.sizes) for _ in range(count)]
    return list(dict.fromkeys(drawn))


def apart(one: Point, other: Point) -> list[float]:
    """Knob by knob."""
    gaps = zip(one, other, GRID.sizes, GRID.ordered, strict=True)
    return [float(a != b) * (0.3 + 0.7 * abs(a - b) / (size - 1) if ordered else 1.0) for a, b, size, ordered in gaps]


def kernel(points: list[Point], others: list[Point], length: float, part: float) -> np.ndarray:
    gaps = np.array([[apart(point, other) for other in others] for point in points])
    return part * np.exp(-2.0 * gaps).mean(axis=2) + (1.0 - part) * np.exp(-gaps.sum(axis=2) / length)


def plain(points: list[Point], targets: np.ndarray, asked: list[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation by the textbook, in units of the targets' standard deviation from their mean."""
    scaled = (targets - targets.mean()) / targets.std()
    count, found = len(points), []
    for length, part, noise in product((1.0, 3.0, 10.0, 30.0), (0.0, 0.5), (1e-4, 1e-2, 1e-1)):
        root = np.linalg.cholesky(kernel(points, points, length, part) + noise * np.eye(count))
        solved = np.linalg.solve(root, scaled)
        scale = max(float(solved @ solved) / count, 1e-6)
        misfit = 0.5 * count * np.log(scale) + np.log(np.diag(root)).sum()
        found.append((misfit, length, part, root, solved, scale))
    _, length, part, root, solved, scale = min(found, key=lambda each: each[0])
    cross = kernel(asked, points, length, part)
    variance = 1.0 - (np.linalg.solve(root, cross.T) ** 2).sum(axis=0)
    return cross @ np.linalg.solve(root.T, solved), np.sqrt(np.maximum(variance, 1e-12) * scale)


@pytest.mark.parametrize("count", [2, 30, 90])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_means_and_deviations_are_those_of_the_textbook(count: int, noise: float) -> None:
    points, asked = draw(count, seed=1), draw(40, seed=2)
    targets = np.array([3 * point[2] + point[3] * point[0] for point in points], dtype=float)
    targets += noise * np.random.default_rng(3).normal(size=len(points))
    means, deviations = GaussianProcess(GRID, points, targets).predict(asked)
    expected = plain(points, targets, asked)
    np.testing.assert_allclose(means, expected[0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(deviations, expected[1], rtol=1e-5, atol=1e-7)


def test_distances_are_sums_over_knobs() -> None:
    points, others = draw(10, seed=4), draw(7, seed=5)
    expected = [[sum(apart(point, other)) for other in others] for point in points]
    np.testing.assert_allclose(GRID.distances(points, others), expected)


def test_what_is_pending_is_no_longer_uncertain_and_moves_no_mean() -> None:
    points, pending = draw(30, seed=6), draw(40, seed=7)[-1:]
    targets = np.array([float(sum(point)) for point in points])
    before, after = GaussianProcess(GRID, points, targets), GaussianProcess(GRID, points, targets, pending)
    assert after.predict(pending)[1] < 0.5 * before.predict(pending)[1]
    np.testing.assert_allclose(after.predict(pending)[0], before.predict(pending)[0], atol=1e-2)


def test_equal_targets_are_no_obstacle() -> None:
    means, deviations = GaussianProcess(GRID, draw(9, seed=8), np.full(9, 5.0)).predict(draw(3, seed=9))
    assert np.all(means == 0.0)
    assert np.all(deviations > 0.0)


def test_improvement_grows_with_what_is_gained_and_with_what_is_not_known() -> None:
    means, deviations = np.array([1.0, 0.0, 1.0]), np.array([0.1, 0.1, 1.0])
    gains = improvement(0.5, means, deviations)
    assert gains[1] > gains[0]
    assert gains[2] > gains[0]
    assert gains[1] == pytest.approx(0.5, rel=1e-3)
