from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import Trial

from flywheel.search.knobs import Choice
from flywheel.search.sampling.local import LocalSampler
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Dimension, Space

Objective = Callable[[Choice], float | None]
Told = list[tuple[Choice, float | None]]
BEST = {f"k{knob}": (3 * knob + 1) % (2 + knob % 5) for knob in range(8)}


@pytest.fixture
def table(lab: Any) -> Space:
    """Eight knobs of two to six values, every third of them without order: 21,600 configurations."""
    dimensions = [Dimension(name, tuple(range(2 + knob % 5)), knob % 3 != 0) for knob, name in enumerate(BEST)]
    return Space(lab.workload, tuple(dimensions))


@pytest.fixture
def small(lab: Any) -> Space:
    """Twelve configurations."""
    return Space(lab.workload, (Dimension("a", (0, 1, 2, 3), True), Dimension("b", ("x", "y", "z"), False)))


def separable(choice: Choice) -> float:
    """100 us at BEST, and 3 to 10 % more for each knob that is elsewhere, and more the farther it is."""
    return 100.0 + sum(
        (3 + knob + abs(int(choice[name]) - best)) * (choice[name] != best)
        for knob, (name, best) in enumerate(BEST.items())
    )


def fragile(choice: Choice) -> float | None:
    """The best of what is feasible takes 115 us, one step away from BEST in two knobs."""
    return None if choice["k5"] == 0 or choice["k2"] == 3 else separable(choice)


def drive(study: CampaignStudy, trials: int, objective: Objective) -> Told:
    told: Told = []
    for _ in range(trials):
        trial, choice = study.ask()
        study.tell(trial, objective(choice))
        told.append((choice, objective(choice)))
    return told


def local(space: Space, seed: int, known: Sequence[tuple[Choice, float | None]] = ()) -> CampaignStudy:
    return CampaignStudy(space, "local", seed, known)


def keys(told: Sequence[tuple[Choice, float | None]]) -> list[tuple[Any, ...]]:
    return [tuple(choice.values()) for choice, _ in told]


@pytest.mark.parametrize("seed", range(2))
def test_the_best_of_a_separable_table_is_found_in_forty_trials(table: Space, seed: int) -> None:
    assert min(value or 1e9 for _, value in drive(local(table, seed), 40, separable)) == 100.0


def test_the_best_is_found_where_part_of_the_space_is_infeasible(table: Space) -> None:
    told = drive(local(table, 1), 40, fragile)
    assert any(value is None for _, value in told)
    assert min(value or 1e9 for _, value in told) == 115.0


def test_the_same_seed_proposes_the_same_and_another_seed_something_else(table: Space) -> None:
    runs = [keys(drive(local(table, seed), 12, fragile)) for seed in (4, 4, 5)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("at", [1, 2, 3, 9])
def test_a_study_rebuilt_from_its_trials_goes_on_with_the_same_proposals(table: Space, at: int) -> None:
    whole = drive(local(table, 2), 14, fragile)
    assert drive(local(table, 2, whole[:at]), 14 - at, fragile) == whole[at:]


def test_nothing_is_proposed_twice_before_everything_was_tried(small: Space) -> None:
    told = drive(local(small, 0), 14, lambda choice: 10.0 + int(choice["a"]) + (choice["b"] != "y"))
    assert len(set(keys(told[:12]))) == 12


def test_a_space_without_a_feasible_point_is_walked_to_its_end(small: Space) -> None:
    assert len(set(keys(drive(local(small, 0), 13, lambda _: None)))) == 12


@pytest.mark.parametrize("known", [0, 1, 10])
def test_points_under_way_are_not_proposed_again(table: Space, known: int) -> None:
    study = local(table, 3)
    told = drive(study, known, separable)
    pending = [study.ask()[1] for _ in range(12)]
    assert len({*keys(told), *(tuple(choice.values()) for choice in pending)}) == known + 12


def test_what_is_enqueued_first_is_where_the_search_goes_on_from(table: Space) -> None:
    study = local(table, 0)
    start = {name: best if name != "k3" else (best + 1) % 5 for name, best in BEST.items()}
    for choice in (start, {**start, "k7": 0}):
        study.enqueue(choice)
    told = drive(study, 12, separable)
    assert max(sum(choice[name] != start[name] for name in start) for choice, _ in told) < len(start)


def test_each_step_of_one_knob_from_the_best_start_is_tried_before_anything_else(table: Space) -> None:
    study = local(table, 0)
    start = dict.fromkeys(BEST, 1)
    for choice in ({**start, "k5": 0}, start, {**start, "k7": 3}):
        study.enqueue(choice)
    told = drive(study, 3 + 19, lambda choice: 50.0 if choice == start else separable(choice))
    steps = [choice for choice, _ in told[3:]]
    assert all(sum(choice[name] != start[name] for name in start) == 1 for choice in steps[:-5])
    assert {name for choice in steps for name in start if choice[name] != start[name]} == set(BEST)


def test_a_value_behind_a_bad_one_is_found(lab: Any) -> None:
    behind = Space(lab.workload, tuple(Dimension(name, tuple(range(5)), True) for name in "abcd"))
    study = local(behind, 0)
    study.enqueue(dict.fromkeys("abcd", 1))
    worth = {0: 3.0, 1: 2.0, 2: 9.0, 3: 0.0, 4: 7.0}
    told = drive(study, 40, lambda choice: 100.0 + sum(worth[int(choice[name])] for name in "abcd"))
    assert min(value or 1e9 for _, value in told) == 100.0


def test_a_space_of_one_point_can_be_asked(lab: Any) -> None:
    study = local(Space(lab.workload, (Dimension("a", (7,), True),)), 0)
    assert [choice for choice, _ in drive(study, 3, lambda _: 1.0)] == [{"a": 7}] * 3


def test_equal_latencies_are_no_obstacle(table: Space) -> None:
    assert len(set(keys(drive(local(table, 0), 8, lambda _: 5.0)))) == 8


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 3), min_size=1, max_size=3),
    values=st.lists(st.none() | st.floats(1.0, 1e6), min_size=27, max_size=27),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_small_table_is_tried_once_and_to_its_end(
    sizes: list[int], values: list[float | None], seed: int
) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=LocalSampler(seed))

    def suggest(trial: Trial) -> tuple[int, ...]:
        return tuple(trial.suggest_int(str(knob), 0, size - 1) for knob, size in enumerate(sizes))

    seen = []
    for value in values[: prod(sizes)]:
        trial = study.ask()
        seen.append(suggest(trial))
        study.tell(trial, value, state=None if value is not None else optuna.trial.TrialState.PRUNED)
    assert len(set(seen)) == prod(sizes)
