"""Two runs of one campaign at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
from effort import examples

from flywheel.errors import StoreError
from flywheel.search.campaign import CampaignResult, CampaignRun, Progress
from flywheel.search.opening import open_campaign
from flywheel.search.space import make_space
from flywheel.search.trials.engine import EvaluationSetup, InlineEngine, TrialEngine
from flywheel.store.sql import open_store

SAMPLERS = ("grid", "descent", "local", "random", "tpe")
EXACT = ("grid", "descent", "local")
"""Samplers that try nothing twice."""


@pytest.fixture
def share(lab: Any, store_url: str) -> Callable[..., list[CampaignResult]]:
    """Two runs of a campaign, each with a store of its own, side by side."""

    def run_both(
        engine: Callable[[EvaluationSetup], TrialEngine] = InlineEngine, **changes: Any
    ) -> list[CampaignResult]:
        spec, space, start = lab.spec(**changes), lab.space(), Barrier(2)
        lab.url = store_url
        with open_store(store_url) as store:
            name = open_campaign(spec, space, store, fresh=False)

        def run() -> CampaignResult:
            with open_store(store_url) as store:
                made = CampaignRun(spec, name, space, store, engine(lab.bench()), lab.environment)
                start.wait()
                return made.run(lambda _: None, lambda: False)

        with ThreadPoolExecutor(2) as pool:
            return [future.result() for future in [pool.submit(run), pool.submit(run)]]

    return run_both


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_two_runs_share_a_campaign_exactly(store_url: str, share: Callable[..., Any], sampler: str) -> None:
    wanted = 40 if sampler == "grid" else 20
    both = Barrier(2)

    def meeting(bench: EvaluationSetup) -> TrialEngine:
        """An engine whose first trial ends when the other run has begun one too."""
        met = iter([both.wait])

        def measure(*work: Any) -> Any:
            for wait in met:
                wait()
            return bench.measure(*work)

        return InlineEngine(replace(bench, measure=measure))

    results = share(meeting, sampler=sampler, trials=wanted, seeds=True)
    with open_store(store_url) as store:
        rows = store.trials("toy")
    assert [row.trial for row in rows] == list(range(28 if sampler == "grid" else wanted))
    assert sum(result.new_trials for result in results) == len(rows)
    assert all(result.trials == len(rows) for result in results)
    if sampler in EXACT:
        assert len({row.config_id for row in rows}) == len(rows)
    assert all(result.new_trials for result in results)


@pytest.mark.parametrize("seed", range(examples(4, 1)))
@pytest.mark.parametrize("sampler", EXACT)
def test_a_study_started_anew_tries_nothing_again_that_is_under_way(
    store_url: str, share: Callable[..., Any], wide: Callable[[EvaluationSetup], TrialEngine], sampler: str, seed: int
) -> None:
    share(wide, sampler=sampler, trials=24, seed=seed)
    with open_store(store_url) as store:
        rows = store.trials("toy")
    assert len({row.config_id for row in rows}) == len(rows) >= 24


@pytest.mark.parametrize("wider", [False, True], ids=["one at a time", "two at a time"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_run_that_learns_of_another_still_tries_every_known_good_schedule_once(
    lab: Any, wide: Callable[[EvaluationSetup], TrialEngine], sampler: str, wider: bool
) -> None:
    pins = {each.name: str(each.values[0]) for each in lab.space().dimensions if len(each.values) == 1}
    space = make_space(lab.workload, {name: value for name, value in pins.items() if name != "kv_block"})
    good = list(dict.fromkeys(space.to_config(choice).config_id for choice in space.known_good()))
    assert len(good) == 3
    spec = lab.spec(sampler=sampler, seeds=True, trials=12)
    run = lab.campaign(spec, wide(lab.bench()) if wider else None, space)

    own: list[str] = []

    def let_another_run(progress: Progress) -> None:
        own.append(progress.record.config_id)
        if progress.new_trials == 1:
            elsewhere = lab.spec(sampler="random", seed=3)  # proposes other schedules than this run would
            other = CampaignRun(elsewhere, "toy", space, lab.store, InlineEngine(lab.bench()), lab.environment)
            other.run(lambda _: None, lambda: other._own >= 2)

    run.run(let_another_run, lambda: False)
    rows = lab.store.trials("toy")
    assert own[:3] == good
    seeds = [row.config_id for row in rows if row.source == "seed"]
    assert len(set(seeds)) == len(seeds)
    if sampler in EXACT:
        assert len({row.config_id for row in rows}) == len(rows) == 12


def test_a_store_that_counts_rows_which_nobody_can_read_ends_a_run(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.campaign(lab.spec(trials=3)).run(lambda _: None, lambda: False)
    whole = lab.store.trials
    monkeypatch.setattr(lab.store, "trials", lambda name, first=0: [] if first else whole(name)[:2])
    run = lab.campaign(lab.spec(trials=6))
    with pytest.raises(StoreError, match="campaign 'toy' counts more rows than the 2 that can be read"):
        run.run(lambda _: None, lambda: False)
