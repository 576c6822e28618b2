from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest

from flywheel.search.sampling.descent import Descent, kick
from flywheel.search.sampling.gaussian import Grid, Point, untried

GRID = Grid((4, 3, 7, 2, 3, 5, 4, 3), (True, True, True, False, True, True, False, True))


def coupled(point: Point) -> float | None:
    """100 at the best point, which lies behind a ridge: two knobs gain together and lose alone. Two knobs have values
    that make no difference, and one value is infeasible."""
    first, second, third, fourth, fifth, sixth, seventh, _ = point
    if sixth == 4 and third > 3:
        return None
    pair = 0.0 if (first, second) == (3, 2) else 4.0 + 2.0 * (first == 3) + 2.0 * (second == 2)
    return 100.0 + pair + 3.0 * abs(min(third, 4) - 2) + 2.0 * fourth + abs(fifth - 1) + abs(sixth - 2) + (seventh == 1)


def hidden(point: Point) -> float | None:
    """100 where the third knob is at 5 and five others have followed, each of which loses without it."""
    followed = sum(value == 1 for value in (point[0], point[1], point[3], point[4], point[5]))
    return 102.0 - 0.7 * followed + 1.5 if point[2] == 5 else 102.0 + 0.5 * followed + 0.9 * (point[2] > 0)


def stairs(point: Point) -> float | None:
    """100 where the first two knobs and the fifth are at 1, 101 where these are at 0, 101.1 with the first one at 1
    alone: of the others, any but the best value loses 1 to 2.5."""
    first, second, fifth = point[0], point[1], point[4]
    steps = {(0, 0, 0): 101.0, (1, 0, 0): 101.1, (1, 1, 0): 101.9, (1, 1, 1): 100.0}
    others = sum(1.0 + 0.5 * knob for knob, at in enumerate((2, 0, 1, 0)) if point[(2, 3, 5, 7)[knob]] != at)
    return steps.get((first, second, fifth), 103.5) + others + (point[6] != 0)


def run(
    grid: Grid,
    trials: int,
    seed: int,
    behind: int = 0,
    start: Point | None = None,
    value: Callable[[Point], float | None] = coupled,
) -> list[tuple[Point, float | None]]:
    """What is asked for, and told `behind` asks later."""
    descent, told = Descent(grid), list[tuple[Point, float | None]]()
    for number in range(trials):
        if number > behind:
            descent.tell(*told[number - behind - 1])
        point = start if start is not None and number == 0 else descent.ask(np.random.default_rng((seed, number)))
        descent.note(point)
        told.append((point, value(point)))
    return told


@pytest.mark.parametrize("behind", [0, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_two_knobs_that_gain_only_together_are_found(seed: int, behind: int) -> None:
    assert min(value for _, value in run(GRID, 400, seed, behind) if value is not None) == 100.0


@pytest.mark.parametrize("seed", range(5))
def test_knobs_that_gain_only_behind_another_one_are_found_by_a_detour(seed: int) -> None:
    told = run(GRID, 200, seed, behind=1, start=(0,) * 8, value=hidden)
    assert min(value for _, value in told if value is not None) == 100.0


@pytest.mark.parametrize("seed", range(5))
def test_a_detour_begins_where_another_one_led_with_its_knob_held(seed: int) -> None:
    told = run(GRID, 350, seed, behind=1, start=(0, 0, 2, 0, 0, 1, 0, 0), value=stairs)
    assert min(value for _, value in told if value is not None) == 100.0


def test_nothing_is_asked_twice_before_everything_was() -> None:
    grid = Grid((3, 2, 4), (True, False, True))
    for behind in (0, 3):
        descent, asked = Descent(grid), list[Point]()
        for number in range(24):
            asked.append(descent.ask(np.random.default_rng(number)))
            if number >= behind:
                descent.tell(asked[number - behind], float(sum(asked[number - behind])))
        assert len(set(asked)) == 24 == prod(grid.sizes)
        assert descent.ask(np.random.default_rng(99)) in set(product(*map(range, grid.sizes)))


def test_the_descent_begins_at_the_best_of_what_it_was_given() -> None:
    descent = Descent(GRID)
    descent.tell((0,) * 8, 200.0)
    descent.tell((1,) * 8, 150.0)
    descent.tell((2, 2, 2, 1, 2, 2, 2, 2), None)
    for number in range(10):
        asked = descent.ask(np.random.default_rng(number))
        assert sum(a != b for a, b in zip(asked, (1,) * 8, strict=True)) == 1


def test_it_begins_at_what_is_under_way_while_nothing_is_known() -> None:
    descent = Descent(GRID)
    descent.note((1,) * 8)
    asked = descent.ask(np.random.default_rng(0))
    assert sum(a != b for a, b in zip(asked, (1,) * 8, strict=True)) == 1


def test_it_goes_to_a_better_point_that_somebody_else_tried() -> None:
    descent, better = Descent(GRID), (2, 2, 2, 1, 2, 2, 2, 2)
    descent.tell((0,) * 8, 200.0)
    descent.ask(np.random.default_rng(0))
    descent.tell(better, 50.0)
    asked = [descent.ask(np.random.default_rng(number)) for number in range(6)]
    assert all(sum(a != b for a, b in zip(each, better, strict=True)) == 1 for each in asked)


def test_values_that_make_no_difference_are_hardly_tried_again() -> None:
    """The last knob has three values and never makes a difference."""
    told = run(GRID, 400, seed=0)
    moved = [a[7] != b[7] and a[:7] == b[:7] for (a, _), (b, _) in pairwise(told[100:])]
    assert sum(moved) < 15


def test_a_kick_moves_so_many_knobs() -> None:
    chance, start = np.random.default_rng(0), (1,) * 8
    for knobs in (2, 3, 4):
        assert sum(a != b for a, b in zip(kick(GRID.beside, start, knobs, chance), start, strict=True)) == knobs


def test_a_fork_that_is_left_alone_changes_nothing() -> None:
    descent, twin = Descent(GRID), Descent(GRID)
    for number in range(30):
        descent.fork().ask(np.random.default_rng(1000 + number))
        point = descent.ask(np.random.default_rng(number))
        assert point == twin.ask(np.random.default_rng(number))
        descent.tell(point, coupled(point))
        twin.tell(point, coupled(point))


def test_the_nearest_untried_point_is_found() -> None:
    grid = Grid((2, 2), (True, True))
    assert untried(grid, (0, 0), {(0, 0), (0, 1), (1, 0)}) == (1, 1)
    assert untried(grid, (0, 0), set(product(range(2), range(2)))) == (0, 0)
