"""Conformance of a store: what holds for every database behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

import flywheel
from flywheel.errors import StoreError
from flywheel.measure.ceiling import Ceiling, PeerLink
from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import Campaign
from flywheel.store.engine import reading
from flywheel.store.schema import trials
from flywheel.store.sql import Store, open_store

Records = Callable[..., TrialRecord]
Campaigns = Callable[..., Campaign]
WRITERS = Path(__file__).with_name("append_rows.py")


@pytest.fixture
def store(store_url: str, make_campaign: Campaigns) -> Iterator[Store]:
    with open_store(store_url) as opened:
        opened.create_campaign(make_campaign("first"))
        opened.create_campaign(make_campaign("second"))
        opened.create_campaign(make_campaign("on-gpu", measure="cuda"))
        yield opened


def test_a_row_comes_back_as_it_was_appended(store: Store, make_record: Records) -> None:
    full = make_record(
        "measured",
        trial=3,
        reason='tab\t, newline\n, quote " and µs',
        predicted_us=0.1 + 0.2,
        predictor="7",
        weight_bytes=140_000_000_000,
        floor_us=535.9,
        tasks=12_000,
        ask_s=1e-9,
        lower_s=0.04,
        validate_s=0.1,
        measure_s=2.0,
        seed=2**40,
        flywheel_version="0.1.0",
        optuna="5.0.0",
        commit="a" * 40,
        gpu_driver="580.1",
    )
    store.append(full)
    store.append(make_record("rejected", trial=1, program_id=None))
    assert store.trials("first") == [make_record("rejected", trial=1, program_id=None), full]


def test_a_reopened_store_still_has_every_row(store_url: str, make_record: Records, make_campaign: Campaigns) -> None:
    with open_store(store_url) as store:
        store.create_campaign(make_campaign())
        store.append(make_record(trial=0))
    with open_store(store_url) as store:
        store.append(make_record(trial=1))
        assert store.campaign("first") == make_campaign()
        assert [record.trial for record in store.trials("first")] == [0, 1]


def test_a_trial_number_is_taken_once_per_campaign(store: Store, make_record: Records) -> None:
    store.append(make_record(trial=5))
    with pytest.raises(StoreError, match="campaign 'first' has trial 5 already"):
        store.append(make_record("rejected", trial=5))
    store.append(make_record(trial=5, campaign="second"))
    assert store.trials("first") == [make_record(trial=5)]


def test_a_trial_of_an_unknown_campaign_is_refused(store: Store, make_record: Records) -> None:
    with pytest.raises(StoreError, match="campaign 'nowhere' does not exist"):
        store.append(make_record(campaign="nowhere"))
    assert store.trials("nowhere") == []


def test_a_campaign_name_is_taken_once(store: Store, make_campaign: Campaigns) -> None:
    with pytest.raises(StoreError, match="campaign 'first' already exists"):
        store.create_campaign(make_campaign("first", seed=9))
    assert store.campaign("first") == make_campaign("first")
    assert store.campaign("nowhere") is None


def test_a_campaign_is_replaced_by_the_first_of_two_that_know_it(store: Store, make_campaign: Campaigns) -> None:
    before = store.campaigns()[0].campaign
    one, other = (replace(before, seed=seed, spec=f'{{"seed": {seed}}}') for seed in (5, 6))
    assert store.replace_campaign(before, one)
    assert not store.replace_campaign(before, other)
    assert store.campaign(before.name) == one


def test_a_campaign_that_lacks_something_is_not_said_to_exist(store: Store, make_campaign: Campaigns) -> None:
    with pytest.raises(ValueError, match="campaign 'third': model is absent"):
        store.create_campaign(make_campaign("third", model=None))
    assert store.campaign("third") is None


def test_a_summary_counts_outcomes_and_keeps_the_kinds_of_best_apart(store: Store, make_record: Records) -> None:
    store.append(make_record("predicted", trial=0, predicted_us=900.0))
    store.append(make_record("predicted", trial=1, predicted_us=800.0))
    store.append(make_record("rejected", trial=2))
    store.append(make_record("measured", trial=0, campaign="on-gpu", predicted_us=1.0, predictor="1"))
    summaries = {summary.campaign.name: summary for summary in store.campaigns()}
    first, second, on_gpu = summaries["first"], summaries["second"], summaries["on-gpu"]
    assert (first.trials, dict(first.outcomes)) == (3, {"predicted": 2, "rejected": 1})
    assert (first.best_predicted_us, first.best_measured_us) == (800.0, None)
    assert (second.trials, second.best_predicted_us, second.best_measured_us) == (0, None, None)
    assert (on_gpu.best_predicted_us, on_gpu.best_measured_us) == (None, 1000.25)


def test_campaigns_of_one_moment_are_listed_by_the_code_points_of_their_names(
    store_url: str, make_campaign: Campaigns
) -> None:
    with open_store(store_url) as store:
        for name in ("b", "a", "B", "_", "ä"):
            store.create_campaign(make_campaign(name))
        store.create_campaign(make_campaign("z", created_at="2025-01-02T03:04:05+00:00"))
        assert [summary.campaign.name for summary in store.campaigns()] == ["z", "B", "_", "a", "b", "ä"]


def test_a_reader_sees_one_state_of_the_store(store_url: str, store: Store, make_record: Records) -> None:
    rows = select(func.count()).select_from(trials)
    with open_store(store_url) as other:
        with reading(other._engine, other.name) as connection:
            before = connection.execute(rows).scalar()
            store.append(make_record())
            after = connection.execute(rows).scalar()
        assert (before, after, len(other.trials("first"))) == (0, 0, 1)


def test_best_never_compares_a_prediction_with_a_measurement(store: Store, make_record: Records) -> None:
    store.append(make_record("predicted", trial=0, predicted_us=1.0))
    store.append(make_record("measured", trial=1, campaign="on-gpu", predicted_us=0.5, predictor="1"))
    fastest_measured, fastest_predicted = store.best(measured=True), store.best(measured=False)
    assert fastest_measured is not None and fastest_measured.objective_us == 1000.25
    assert fastest_predicted is not None and fastest_predicted.objective_us == 1.0


def test_best_is_the_first_of_equals_and_narrows_by_name(store: Store, make_record: Records) -> None:
    for trial, predicted_us in enumerate([3.0, 2.0, 2.0]):
        store.append(make_record(trial=trial, predicted_us=predicted_us))
    store.append(make_record(trial=0, campaign="second", predicted_us=1.0, gpu="l4", predictor="2"))
    best = store.best(measured=False, campaign="first", model="llama3.2-1b", gpu="h100", context=512)
    assert best is not None and best.trial == 1
    on_l4 = store.best(measured=False, gpu="l4", predictor="2")
    assert on_l4 is not None and on_l4.campaign == "second"
    assert store.best(measured=False, gpu="l4", predictor="1") is None


def test_a_prediction_is_seen_by_its_own_cost_model_only(store: Store, make_record: Records) -> None:
    store.append(make_record("predicted", predictor="1"))
    key = {"gpu": "h100", "dtype": "BF16", "measure": "predict"}
    assert store.seen("0123456789ab", predictor="1", **key) == make_record("predicted", predictor="1")
    assert store.seen("0123456789ab", predictor="2", **key) is None
    assert store.seen("0123456789ab", **key) is None


@pytest.mark.parametrize("outcome", ["measured", "rejected", "incorrect"])
def test_a_lasting_outcome_is_seen_in_later_campaigns(store: Store, make_record: Records, outcome: str) -> None:
    store.append(make_record(outcome, campaign="on-gpu"))
    found = store.seen("0123456789ab", gpu="h100", dtype="BF16", measure="cuda")
    assert found == make_record(outcome, campaign="on-gpu")


def test_other_programs_gpus_dtypes_measures_and_passing_troubles_are_not_seen(
    store: Store, make_record: Records
) -> None:
    store.append(make_record("measured", campaign="on-gpu"))
    store.append(make_record("crashed", campaign="on-gpu", trial=1, program_id="ffffffffffff"))
    assert store.seen("0123456789ac", gpu="h100", dtype="BF16", measure="cuda") is None
    assert store.seen("0123456789ab", gpu="h200", dtype="BF16", measure="cuda") is None
    assert store.seen("0123456789ab", gpu="h100", dtype="F16", measure="cuda") is None
    assert store.seen("0123456789ab", gpu="h100", dtype="BF16", measure="predict") is None
    assert store.seen("ffffffffffff", gpu="h100", dtype="BF16", measure="cuda") is None


@pytest.mark.parametrize(
    "changes", [{"weight_bytes": 2**70}, {"reason": "\udcff"}], ids=["integer-too-large", "lone-surrogate"]
)
def test_a_value_that_no_database_holds_makes_no_row(
    store: Store, make_record: Records, changes: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="trial 0 of campaign 'first'"):
        store.append(make_record(**changes))
    assert store.trials("first") == []


def write_rows(url: str, writers: int, rows: int) -> Store:
    """The store into which so many processes at once have appended so many rows in all."""
    environment = {**os.environ, "PYTHONPATH": str(Path(flywheel.__file__).parents[1])}
    command = [sys.executable, str(WRITERS), url, str(writers), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return open_store(url, create=False)


@pytest.mark.parametrize("rows", [pytest.param(10_000, marks=pytest.mark.slow), 160])
def test_of_eight_writers_rows_none_is_lost_and_none_is_there_twice(store_url: str, rows: int) -> None:
    with write_rows(store_url, 8, rows) as store:
        for campaign in ("shared", *(f"own-{writer}" for writer in range(8))):
            records = store.trials(campaign)
            assert [record.trial for record in records] == list(range(len(records)))
            authors = Counter((record.host, record.seed) for record in records)
            hosts = [f"writer-{n}" for n in range(8)] if campaign == "shared" else [campaign.replace("own", "writer")]
            assert authors == Counter((host, number) for host in hosts for number in range(rows // 16))


def test_a_measurement_answers_only_for_the_machine_that_it_was_made_on(store: Store, make_record: Records) -> None:
    machine = {"gpu_name": "NVIDIA H200", "gpu_driver": "580.1", "nvrtc": "13.5", "kernels": "feed"}
    wanted: dict[str, Any] = {"gpu": "h100", "dtype": "BF16", "measure": "cuda"}
    record = make_record("measured", campaign="on-gpu", **machine)
    store.append(record)
    assert store.seen("0123456789ab", **wanted, machine=machine) == record
    for name in machine:
        for other in ("another", None):
            assert store.seen("0123456789ab", **wanted, machine={**machine, name: other}) is None


def test_the_newest_probing_of_a_gpu_holds(store: Store) -> None:
    first = Ceiling("NVIDIA H200", "580.1", "lab", 4500.0, "loads", 1.5, "2026-01-02T03:04:05+00:00")
    second = replace(first, read_gbs=4608.0, gpu_driver=None)
    assert store.ceiling("NVIDIA H200") is None
    for found in (first, second, replace(first, gpu="NVIDIA L4")):
        store.append_ceiling(found)
    assert store.ceiling("NVIDIA H200") == second


def test_all_links_of_the_newest_probing_of_a_gpu_hold(store: Store) -> None:
    first = PeerLink("NVIDIA H200", "580.1", "lab", 1, 0.95, 0.48, 396.0, 397.0, "2026-01-02T03:04:05+00:00")
    again = replace(first, one_way_us=0.94, created_at="2026-01-03T03:04:05+00:00")
    assert store.links("NVIDIA H200") == []
    other = replace(first, gpu="NVIDIA L4")
    for found in (first, replace(first, peer=3), replace(again, peer=2), again, other):
        store.append_link(found)
    assert store.links("NVIDIA H200") == [again, replace(again, peer=2)]
    with pytest.raises(ValueError, match=r"^link of 'NVIDIA H200': to_gbs is 0\.0, not positive$"):
        replace(first, to_gbs=0.0)
