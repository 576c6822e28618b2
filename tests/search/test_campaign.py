from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from effort import pairs

from flywheel.errors import UsageError
from flywheel.ir import MegakernelProgram
from flywheel.measure.latency import PredictedLatency
from flywheel.measure.outcome import Crashed, NoMemory, Predicted, TrialOutcome
from flywheel.measure.standing import best_of
from flywheel.search.opening import open_campaign
from flywheel.search.space import make_space
from flywheel.search.trials.engine import InlineEngine
from flywheel.search.workload import Workload

SAMPLERS = "descent", "local", "tpe", "cmaes", "random", "grid"


def test_trials_are_numbered_from_zero_and_the_best_is_kept(lab: Any) -> None:
    seen = []
    result = lab.run(lab.spec(), watch=seen.append)
    records = lab.store.trials("toy")
    assert [record.trial for record in records] == list(range(12))
    assert (result.stopped, result.trials, result.new_trials, result.name) == ("trials", 12, 12, "toy")
    assert result.best == min(records, key=lambda record: (record.predicted_us, record.trial))
    assert result.outcomes == {"predicted": 12}
    assert [progress.record for progress in seen] == records
    assert [progress.best.predicted_us for progress in seen] == [
        min(record.predicted_us for record in records[: count + 1]) for count in range(12)
    ]
    improved = [progress.record for progress in seen if progress.improved]
    assert improved[-1] == result.best
    assert all(record.floor_fraction == record.floor_us / record.predicted_us for record in records)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_resuming_goes_on_where_it_stopped(lab: Any, sampler: str) -> None:
    lab.run(lab.spec(sampler=sampler, trials=8))
    result = lab.run(lab.spec(sampler=sampler, trials=16))
    assert (result.trials, result.new_trials) == (16, 8)
    assert [record.trial for record in lab.store.trials("toy")] == list(range(16))
    # A resumed sampler that replayed its first draws would propose the first eight again.
    configs = lab.configs()
    assert configs[8:] != configs[:8]
    if sampler == "grid":
        assert len(set(configs)) == 16


def test_a_spent_campaign_is_not_run_again(lab: Any) -> None:
    first = lab.run(lab.spec())
    again = lab.run(lab.spec())
    assert (again.trials, again.new_trials, again.stopped, again.best) == (12, 0, "trials", first.best)


@pytest.mark.parametrize(("sampler", "parallel"), pairs(SAMPLERS, [False, True]))
def test_a_seed_decides_every_proposal(lab: Any, wide: Callable[..., Any], sampler: str, parallel: bool) -> None:
    for name in ("first", "second"):
        engine = wide(lab.bench()) if parallel else InlineEngine(lab.bench())
        lab.run(lab.spec(name=name, sampler=sampler, trials=15), engine)
    lab.run(lab.spec(name="other", sampler=sampler, seed=1, trials=15))
    assert lab.configs("first") == lab.configs("second")
    assert lab.configs("first") != lab.configs("other")


def test_repeated_programs_are_answered_from_the_store(lab: Any) -> None:
    lab.run(lab.spec(trials=40), space=lab.space(threads="320"))
    records = lab.store.trials("toy")
    first: dict[str, Any] = {}
    for record in records:
        known = first.setdefault(record.program_id, record)
        assert record.source == ("search" if known is record else "store")
        assert (record.predicted_us, record.outcome) == (known.predicted_us, known.outcome)
    assert len(first) == 7


def test_another_campaign_answers_too(lab: Any) -> None:
    lab.run(lab.spec(name="first", sampler="grid", trials=28))
    lab.run(lab.spec(name="second", sampler="grid", trials=28, seed=3))
    assert {record.source for record in lab.store.trials("second")} == {"store"}


@pytest.mark.parametrize("parallel", [False, True], ids=["one", "two"])
def test_a_grid_tries_each_config_once_and_ends(lab: Any, wide: Callable[..., Any], parallel: bool) -> None:
    engine = wide(lab.bench()) if parallel else None
    result = lab.run(lab.spec(sampler="grid", trials=100), engine)
    assert (result.stopped, result.trials) == ("exhausted", 28)
    assert len(set(lab.configs())) == 28


def test_a_grid_of_other_pins_goes_on_in_the_same_campaign(lab: Any) -> None:
    lab.run(lab.spec(sampler="grid", trials=100), space=lab.space(threads="320"))
    result = lab.run(lab.spec(sampler="grid", trials=100), space=lab.space(threads="512"))
    assert (result.stopped, result.new_trials) == ("exhausted", 7)
    assert len(set(lab.configs())) == 14


def test_known_good_choices_are_tried_first(lab: Any) -> None:
    space = make_space(lab.workload)
    lab.run(lab.spec(seeds=True, trials=4), space=space)
    good = [space.to_config(choice).config_id for choice in space.known_good()]
    records = lab.store.trials("toy")
    assert [record.config_id for record in records][: len(good)] == good
    assert [record.source for record in records][:4] == ["seed", "seed", "seed", "search"]
    lab.run(lab.spec(seeds=True, trials=8), space=space)
    assert [record.config_id for record in lab.store.trials("toy")].count(good[0]) == 1


def test_a_good_enough_fraction_of_the_floor_ends_a_campaign(lab: Any) -> None:
    assert lab.run(lab.spec(until=1e-9)).trials == 1
    result = lab.run(lab.spec(until=1e-9))
    assert (result.stopped, result.new_trials) == ("until", 0)
    assert lab.run(lab.spec(until=0.999)).stopped == "trials"


def test_time_ends_a_campaign(lab: Any) -> None:
    result = lab.run(lab.spec(time_s=1e-9))
    assert (result.stopped, result.trials, result.best) == ("time", 0, None)


def test_patience_ends_a_campaign_and_is_remembered(lab: Any) -> None:
    flat = InlineEngine(lab.bench(lambda program: Predicted(PredictedLatency(5.0, "flat"))))
    result = lab.run(lab.spec(patience=3), flat)
    assert (result.stopped, result.trials) == ("patience", 4)
    again = lab.run(lab.spec(patience=3), flat)
    assert (again.stopped, again.new_trials) == ("patience", 0)
    assert lab.run(lab.spec(patience=5), flat).new_trials == 2


def test_an_interrupted_campaign_keeps_what_was_under_way(lab: Any, wide: Callable[..., Any]) -> None:
    engine = wide(lab.bench())
    done: list[object] = []
    result = lab.run(lab.spec(sampler="grid"), engine, watch=done.append, interrupted=lambda: len(done) >= 3)
    assert result.stopped == "interrupted"
    assert result.trials == len(engine.submitted) == len(done) == 4
    assert lab.configs() == [config.config_id for config in engine.submitted]
    assert lab.run(lab.spec(sampler="grid")).new_trials == 8


def test_infeasible_trials_are_kept_and_never_best(lab: Any, toy_measures: ModuleType) -> None:
    result = lab.run(lab.spec(sampler="grid", trials=28), InlineEngine(lab.bench(toy_measures.fragile)))
    assert result.outcomes == {"predicted": 12, "crashed": 16}
    records = lab.store.trials("toy")
    assert {record.reason for record in records if record.outcome == "crashed"} == {"too deep"}
    assert result.best == best_of(records)
    assert best_of([record for record in records if record.outcome == "crashed"]) is None
    assert best_of([]) is None


def test_what_found_no_memory_is_neither_remembered_nor_learnt_from_and_tried_by_the_next_run(
    lab: Any, toy_measures: ModuleType
) -> None:
    """Another tenant's memory says nothing of a program."""

    def crowded(program: MegakernelProgram) -> TrialOutcome:
        fragile = toy_measures.fragile(program)
        return NoMemory("9 GB requested, 1 GB free") if isinstance(fragile, Crashed) else fragile

    spec = lab.spec(sampler="grid", trials=28)
    assert lab.run(spec, InlineEngine(lab.bench(crowded))).outcomes == {"predicted": 12, "no_memory": 16}
    first = lab.store.trials("toy")
    assert {row.reason for row in first if row.outcome == "no_memory"} == {"9 GB requested, 1 GB free"}
    lab.run(lab.spec(sampler="grid", trials=44), InlineEngine(lab.bench(toy_measures.smooth)))
    again = lab.store.trials("toy")[28:]
    assert {row.outcome for row in again} == {"predicted"}
    assert {row.config_id for row in again} == {row.config_id for row in first if row.outcome == "no_memory"}


def test_two_runs_of_one_campaign_share_its_numbers_and_its_budget(lab: Any) -> None:
    first, second = lab.campaign(lab.spec(trials=6)), lab.campaign(lab.spec(trials=6))
    second_done = []

    def run_the_other(progress: Any) -> None:
        if progress.trials == 3:
            second_done.append(second.run(lambda _: None, lambda: False))

    result = first.run(run_the_other, lambda: False)
    records = lab.store.trials("toy")
    assert [record.trial for record in records] == list(range(len(records)))
    assert result.new_trials + second_done[0].new_trials == len(records)
    assert result.trials == len(records) == 6


def test_a_run_that_learns_of_another_proposes_something_else(lab: Any) -> None:
    first, second = lab.campaign(lab.spec(trials=12)), lab.campaign(lab.spec(trials=12))

    def run_the_other(progress: Any) -> None:
        if progress.new_trials == 1:
            second.run(lambda _: None, lambda: second._own >= 5)

    first.run(run_the_other, lambda: False)
    configs = lab.configs()
    assert len(set(configs)) > len(configs) // 2 + 1


def test_other_pins_are_another_campaign(lab: Any) -> None:
    open_campaign(lab.spec(), lab.space(), lab.store, fresh=False)
    with pytest.raises(UsageError, match=r"^campaign 'toy' has no --fix; this search has --fix depth=0; --fresh"):
        open_campaign(replace(lab.spec(), fix={"depth": "0"}), lab.space(), lab.store, fresh=False)


def test_a_name_is_resumed_unless_a_fresh_campaign_is_wanted(lab: Any) -> None:
    spec, space = lab.spec(), lab.space()
    names = [open_campaign(spec, space, lab.store, fresh) for fresh in (False, False, True, False, True, True)]
    assert names == ["toy", "toy", "toy.2", "toy.2", "toy.3", "toy.4"]
    described = json.loads(lab.store.campaign("toy.3").spec)
    assert (described["sampler"], described["context"], described["decoder"]["hidden"]) == ("random", 64, 96)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"context": 32}, "context=64, not 32"),
        ({"dtype": "f16"}, "dtype=bf16, not f16"),
        ({"gpu": "h100"}, "gpu=few"),
        ({"sampler": "descent"}, "sampler=random, not descent"),
        ({"seed": 7}, "seed=0, not 7"),
        ({"seeds": True}, "seeds=False, not True"),
        ({"warm": False}, "warm=True, not False"),
    ],
)
def test_a_campaign_that_searched_something_else_is_not_resumed(lab: Any, change: dict[str, Any], fact: str) -> None:
    open_campaign(lab.spec(), lab.space(), lab.store, fresh=False)
    other = replace(lab.spec(), **change)
    with pytest.raises(UsageError, match=rf"^campaign 'toy' has {fact}.*--fresh or --name starts a new one$"):
        open_campaign(other, lab.space(), lab.store, fresh=False)
    assert open_campaign(other, lab.space(), lab.store, fresh=True) == "toy.2"


def test_a_model_that_changed_under_its_name_is_not_resumed(lab: Any) -> None:
    open_campaign(lab.spec(), lab.space(), lab.store, fresh=False)
    work = lab.workload
    changed = make_space(Workload("small", replace(work.spec, vocab=301), work.target, "bf16", 64))
    with pytest.raises(UsageError, match=r"^campaign 'toy' searched another model of that name; --fresh"):
        open_campaign(lab.spec(), changed, lab.store, fresh=False)


def test_a_prediction_that_is_hardly_better_is_no_gain(lab: Any) -> None:
    steps = iter([100.0, 99.9, 99.8, 99.7, 99.6, 99.0, 98.0])
    closer = InlineEngine(lab.bench(lambda program: Predicted(PredictedLatency(next(steps), "closer"))))
    result = lab.run(lab.spec(patience=4, trials=10), closer)
    assert (result.stopped, result.trials) == ("patience", 5)
    assert lab.run(lab.spec(patience=4, trials=10), closer).new_trials == 0
    assert lab.run(lab.spec(patience=5, trials=6), closer).new_trials == 1
