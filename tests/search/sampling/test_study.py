from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch
from optuna.samplers import RandomSampler
from optuna.trial import TrialState
from threadpoolctl import threadpool_info, threadpool_limits

from flywheel.search.knobs import Choice
from flywheel.search.sampling.samplers import SAMPLERS
from flywheel.search.sampling.study import NOT_TRIED, CampaignStudy, Told, _quiet
from flywheel.search.space import make_space

Objective = Callable[[Choice], float | None]


def smooth(choice: Choice) -> float:
    return 100.0 - 2 * int(choice["depth"]) - int(choice["threads"]) / 32


def fragile(choice: Choice) -> float | None:
    """Half of the space has no objective, and the best of it lies at the edge of what has none."""
    return None if int(choice["depth"]) > 2 else smooth(choice)


def unfused_only(choice: Choice) -> float | None:
    """No objective in that half of the space where norm and projections are fused."""
    return None if choice["fuse.qkv"] else smooth(choice)


def drive(study: CampaignStudy, trials: int, objective: Objective) -> list[tuple[Choice, float | None]]:
    told = []
    for _ in range(trials):
        trial, choice = study.ask()
        study.tell(trial, objective(choice))
        told.append((choice, objective(choice)))
    return told


def states(study: CampaignStudy) -> list[TrialState]:
    return [trial.state for trial in study._study.trials]


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_a_study_restored_from_records_asks_without_a_word(lab: Any, sampler: str) -> None:
    told = drive(CampaignStudy(lab.space(), "random", 0, []), 12, fragile)
    assert any(objective is None for _, objective in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = CampaignStudy(lab.space(), sampler, 0, told)
        more = drive(restored, 4, fragile)
    assert all(lab.space().to_choice(lab.space().to_config(choice)) == choice for choice, _ in more)
    assert len(states(restored)) == 16
    assert TrialState.FAIL not in states(restored)


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_a_first_infeasible_trial_is_pruned_and_none_ever_fails(lab: Any, sampler: str) -> None:
    study = CampaignStudy(lab.space(), sampler, 1, [])
    told = drive(study, 8, fragile)
    first = next(index for index, (_, objective) in enumerate(told) if objective is not None)
    assert states(study) == [TrialState.PRUNED] * first + [TrialState.COMPLETE] * (8 - first)


def test_an_infeasible_trial_is_told_as_the_worst_so_far_and_breaks_a_constraint(lab: Any) -> None:
    study = CampaignStudy(lab.space(), "random", 0, [])
    for objective in (7.0, 9.0, None, 8.0):
        study.tell(study.ask()[0], objective)
    trials = study._study.trials
    assert [trial.value for trial in trials] == [7.0, 9.0, 9.0, 8.0]
    assert [trial.constraints["feasible"] > 0 for trial in trials] == [False, False, True, False]


def test_restoring_tells_what_telling_told(lab: Any) -> None:
    live = CampaignStudy(lab.space(), "random", 4, [])
    told = drive(live, 20, fragile)
    restored = CampaignStudy(lab.space(), "random", 4, told)
    for ours, theirs in zip(live._study.trials, restored._study.trials, strict=True):
        assert (ours.params, ours.value, ours.state) == (theirs.params, theirs.value, theirs.state)
        assert ours.constraints == theirs.constraints
        assert ours.distributions == theirs.distributions


def test_tpe_learns_to_avoid_what_is_infeasible(lab: Any) -> None:
    space = make_space(lab.workload)

    def late_failures(sampler: str) -> int:
        told = [drive(CampaignStudy(space, sampler, seed, []), 50, unfused_only) for seed in range(3)]
        return sum(objective is None for run in told for _, objective in run[25:])

    assert late_failures("tpe") < late_failures("random") / 2


def test_an_enqueued_choice_is_asked_next(lab: Any) -> None:
    space = lab.space()
    study = CampaignStudy(space, "tpe", 0, [])
    wanted = {dimension.name: dimension.values[-1] for dimension in space.dimensions}
    study.enqueue(wanted)
    assert study.ask()[1] == wanted


def test_a_space_of_one_choice_can_be_asked(lab: Any) -> None:
    space = lab.space(depth="2", threads="320")
    for sampler in ("descent", "local", "tpe", "cmaes", "random", "grid"):
        study = CampaignStudy(space, sampler, 0, [])
        assert [choice["depth"] for choice, _ in drive(study, 3, smooth)] == [2, 2, 2]


def test_a_sampler_is_asked_on_one_thread_of_blas(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    class Looking(RandomSampler):
        def sample_independent(self, *arguments: Any) -> Any:
            seen.append({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"})
            return super().sample_independent(*arguments)

    monkeypatch.setitem(SAMPLERS, "random", Looking)
    with threadpool_limits(limits=2, user_api="blas"):
        CampaignStudy(lab.space(), "random", 0, []).ask()
    assert seen
    assert {1} == set().union(*seen)


def test_a_sampler_that_computes_with_torch_is_asked_on_one_thread_of_it(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Looking(RandomSampler):
        def sample_independent(self, *arguments: Any) -> Any:
            seen.append(torch.get_num_threads())
            return super().sample_independent(*arguments)

    monkeypatch.setitem(SAMPLERS, "gp", Looking)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        CampaignStudy(lab.space(), "gp", 0, []).ask()
        assert (set(seen), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_two_threads_that_ask_leave_the_filters_of_warnings_as_they_were() -> None:
    """The thread that makes the first predictions asks beside the campaign's own."""
    before, inside, leave = list(warnings.filters), Event(), Event()

    def other() -> None:
        with _quiet():
            inside.set()
            leave.wait()

    thread = Thread(target=other)
    with _quiet():
        assert list(warnings.filters) != before
        thread.start()
        inside.wait()
    leave.set()
    thread.join()
    assert list(warnings.filters) == before


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_of_a_choice_that_was_not_tried_samplers_learn_nothing(lab: Any, sampler: str) -> None:
    """Neither an objective, nor that it is infeasible; told live or restored."""
    live = CampaignStudy(lab.space(), sampler, 4, [])
    told: list[tuple[Choice, Told]] = []
    for number in range(9):
        trial, choice = live.ask()
        objective: Told = NOT_TRIED if number in (2, 5, 6) else smooth(choice)
        live.tell(trial, objective)
        told.append((choice, objective))
    restored = CampaignStudy(lab.space(), sampler, 4, told)
    for study in (live, restored):
        left = [trial for trial in study._study.trials if trial.state is TrialState.FAIL]
        assert [trial.number for trial in left] == [2, 5, 6]
        assert all(trial.values is None and not trial.constraints for trial in left)
        assert study._study.best_value == min(us for _, us in told if isinstance(us, float))


@pytest.mark.parametrize("sampler", ["local", "grid"])
def test_a_choice_that_was_not_tried_is_not_proposed_again(lab: Any, sampler: str) -> None:
    study = CampaignStudy(lab.space(threads="320"), sampler, 0, [])
    asked = []
    for number in range(7):
        trial, choice = study.ask()
        study.tell(trial, NOT_TRIED if number % 2 else smooth(choice))
        asked.append(choice["depth"])
    assert len(set(asked)) == 7
