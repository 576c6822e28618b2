from __future__ import annotations

from itertools import product
from math import inf

from flywheel.search.sampling.contrasts import Contrasts
from flywheel.search.sampling.gaussian import Grid, Point

GRID = Grid((4, 3, 3), (True, True, False))


def value(point: Point) -> float:
    """The first knob's last two values make no difference, its first one always loses 4 %; the second knob's best value
    depends on the third; the second one's last value is infeasible."""
    first, second, third = point
    if second == 2:
        return inf
    return 100.0 + 4.0 * (first == 0) + 0.5 * (first == 1) + 0.6 * (second == (third == 0))


def learnt() -> Contrasts:
    """From all points of the grid."""
    contrasts, values = Contrasts(GRID), dict[Point, float]()
    for point in product(*map(range, GRID.sizes)):
        values[point] = value(point)
        contrasts.add(point, values)
    return contrasts


def test_values_that_made_no_difference_are_alike_in_both_directions() -> None:
    contrasts = learnt()
    assert contrasts.are_alike(0, 2, 3)
    assert contrasts.are_alike(0, 3, 2)
    assert contrasts.is_vain(0, 2, 3, 0.03)
    assert not contrasts.are_alike(0, 1, 2)


def test_a_value_that_was_worse_each_time_is_vain_and_the_way_back_is_not() -> None:
    contrasts = learnt()
    assert contrasts.is_vain(0, 1, 0, 0.03)
    assert not contrasts.is_vain(0, 0, 1, 0.03)


def test_a_value_that_was_better_beside_some_value_of_another_knob_is_not_vain() -> None:
    contrasts = learnt()
    assert not contrasts.is_vain(1, 0, 1, 0.03)
    assert not contrasts.is_vain(1, 1, 0, 0.03)


def test_a_value_that_was_always_infeasible_is_vain_and_two_infeasible_points_say_nothing() -> None:
    contrasts = learnt()
    assert contrasts.is_vain(1, 0, 2, 0.03)
    assert not contrasts.is_vain(1, 2, 0, 0.03)
    for knob in (0, 2):
        small, point = Contrasts(GRID), (1, 1, 1)
        values = dict.fromkeys([point, *GRID.beside(point, knob)], inf)
        for each in values:
            small.add(each, values)
        assert not any(small.is_vain(knob, one, other, 0.03) for one in range(3) for other in range(3))


def test_few_comparisons_say_nothing_of_what_is_worse() -> None:
    contrasts, values = Contrasts(GRID), dict[Point, float]()
    for point in [(1, 0, 0), (0, 0, 0), (1, 1, 0), (0, 1, 0)]:
        values[point] = value(point)
        contrasts.add(point, values)
    assert not contrasts.is_vain(0, 1, 0, 0.03)
