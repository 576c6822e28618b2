from __future__ import annotations

import numpy as np
import pytest

from flywheel.search.sampling import expectation
from flywheel.search.sampling.expectation import Coordinates, Expectation, Lessons, axes_of, warped
from flywheel.search.sampling.gaussian import Array, Grid, Point, improvement

AXES = {
    "a": Coordinates((0.0, 0.4, 1.0, 2.5), True),
    "b": Coordinates((0.0, 1.0, 2.0), False),
    "c": Coordinates((0.0, 1.0, 2.0, 4.0), True),
}
NAMES = ("a", "b", "c", "d")
POINTS = [(a, b, c) for a in range(4) for b in range(3) for c in range(4)]


def place(point: Point) -> list[float]:
    return [axis.values[index] for axis, index in zip(AXES.values(), point, strict=True)]


def loss(place: Array) -> Array:
    """What is lost by distance from a = 1, b = 2, c = 1, where a and c count together, too."""
    a, b, c = (place[:, knob] for knob in range(3))
    return 0.02 * np.abs(a - 1.0) + 0.01 * (b != 2.0) + 0.015 * np.abs(c - 1.0) + 0.01 * (a > 1.0) * (c > 1.0)


def lessons(likeness: float = 0.9, rows: int = 20) -> Lessons:
    """Two works that measured the same landscape, of a knob `d` too, which the search does not search."""
    chance = np.random.default_rng(0)
    places = np.array([place(POINTS[int(index)]) for index in chance.choice(len(POINTS), rows, replace=False)])
    pinned = np.zeros((rows, 1))
    return Lessons(
        starts=(),
        axes={**AXES, "d": Coordinates((0.0,), True)},
        names=NAMES,
        places=np.hstack([places, pinned]),
        losses=loss(places),
        campaign=np.arange(rows) % 2,
        likeness=np.full(2, likeness),
        between=np.array([[1.0, likeness], [likeness, 1.0]]),
    )


def gap(one: float, other: float, ordered: bool) -> float:
    steps = abs(one - other)
    return 0.3 * min(steps / 0.5, 1.0) + 0.7 * min(steps / 3.0, 1.0) if ordered else float(one != other)


def kernel(ones: Array, others: Array) -> Array:
    """By the book, of rows of coordinates of NAMES."""
    ordered = [True, False, True, True]
    gaps = np.array([[[gap(a, b, o) for a, b, o in zip(x, y, ordered, strict=True)] for y in others] for x in ones])
    mixed = expectation._ADDITIVE
    return mixed * np.exp(-2.0 * gaps).mean(axis=2) + (1 - mixed) * np.exp(-gaps.sum(axis=2) / expectation._LENGTH)


def test_expectations_are_those_of_one_process_over_the_rows_of_all_works() -> None:
    known, seen = lessons(), POINTS[5::7]
    own = np.array([[*place(point), 0.0] for point in POINTS])
    index = [POINTS.index(point) for point in seen]
    predictions = np.full(len(POINTS), 700.0)
    latencies = 700.0 * np.exp(loss(own[index]))
    model = Expectation(AXES, known)
    means, deviations = model.expect(POINTS, predictions, seen, predictions[index], latencies)

    every = np.vstack([known.places, own[index], own])
    work = np.concatenate([known.campaign, np.full(len(index) + len(own), 2)])
    shared = np.array([[1.0, 0.9, 0.9], [0.9, 1.0, 0.9], [0.9, 0.9, 1.0]])[work][:, work]
    same = work[:, None] == work[None, :]
    covariance = expectation._DEVIATION**2 * kernel(every, every) * (shared + expectation._OWN * same)
    covariance += expectation._LEVEL**2 * same
    told = len(known.losses) + len(index)
    inner = covariance[:told, :told] + expectation._NOISE**2 * np.eye(told)
    targets = np.concatenate([known.losses - np.median(known.losses), warped(np.log(latencies))])
    level = targets[-len(index) :].mean()
    targets[-len(index) :] -= level
    cross = covariance[told:, :told]
    expected = level + cross @ np.linalg.solve(inner, targets)
    variance = np.diag(covariance)[told:] - np.einsum("ij,ji->i", cross, np.linalg.solve(inner, cross.T))
    np.testing.assert_allclose(means, expected, atol=2e-4)
    np.testing.assert_allclose(deviations, np.sqrt(variance), rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("likeness", [0.3, 0.9])
def test_other_works_say_which_points_are_good_before_any_measurement(likeness: float) -> None:
    losses = loss(np.array([place(point) for point in POINTS]))
    said = Expectation(AXES, lessons(likeness)).prior(POINTS)
    assert np.corrcoef(said, losses)[0, 1] > 0.8
    assert losses[int(said.argmin())] <= 0.01


def test_without_lessons_the_best_prediction_is_expected_to_be_the_best() -> None:
    model = Expectation(AXES, None)
    predictions = np.linspace(900.0, 600.0, len(POINTS))
    means, _ = model.expect(POINTS, predictions, [], np.array([]), np.array([]))
    assert list(np.argsort(means)) == list(range(len(POINTS)))[::-1]
    assert model.guess_us(POINTS[3], 650.0) == 650.0


def test_measurements_correct_what_other_works_say() -> None:
    """Here b = 0 is best, unlike elsewhere."""
    known, model = lessons(), Expectation(AXES, lessons())
    own = {point: 500.0 * np.exp(loss(np.array([place(point)]))[0] + 0.05 * (point[1] == 2)) for point in POINTS}
    seen = POINTS[::5]
    predictions = np.full(len(POINTS), 500.0)
    means, _ = model.expect(
        POINTS, predictions, seen, predictions[: len(seen)], np.array([own[point] for point in seen])
    )
    assert known.losses.min() >= 0.0
    assert POINTS[int(model.prior(POINTS).argmin())][1] == 2
    assert POINTS[int(means.argmin())][1] != 2


def test_a_few_measurements_find_the_best_where_works_are_alike_and_few_more_where_they_are_not() -> None:
    for shift, most in ((0.0, 3), (0.04, 12)):
        model, tried = Expectation(AXES, lessons()), list[Point]()
        truth = {p: 500.0 * np.exp(loss(np.array([place(p)]))[0] + shift * (p[1] == 2)) for p in POINTS}
        while not tried or min(truth[point] for point in tried) > min(truth.values()) * 1.002:
            new = [point for point in POINTS if point not in tried]
            at, told = np.full(len(tried), 500.0), np.array([truth[point] for point in tried])
            means, deviations = model.expect(new, np.full(len(new), 500.0), tried, at, told)
            gains = improvement(np.log(told.min()), means, deviations) if tried else -means
            tried.append(new[int(gains.argmax())])
        assert len(tried) <= most


def test_axes_without_lessons_are_indices_that_span_as_much_for_each_knob() -> None:
    axes = axes_of(Grid((3, 2), (True, False)), ["x", "y"], None)
    assert axes["x"] == Coordinates((0.0, 1.5, 3.0), True)
    assert not axes["y"].ordered
