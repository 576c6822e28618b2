from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flywheel.measure.latency import curtailed
from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import Campaign
from flywheel.store.mirror import (
    MAX_VALUE,
    campaign_key,
    campaign_params,
    campaign_points,
    code_span,
    columns,
    trial_points,
)
from flywheel.store.tracking import shown

Records = Callable[..., TrialRecord]
Campaigns = Callable[..., Campaign]


def series(records: list[TrialRecord], name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in campaign_points(records) if point.name == name]


def test_the_best_so_far_is_a_series_with_the_trials_numbers_as_steps(make_record: Records) -> None:
    times = (900.0, 950.0, 800.0)
    records = [make_record(trial=trial, predicted_us=us) for trial, us in enumerate(times)]
    assert series(records, "best_us/predicted") == [(0, 900.0), (1, 900.0), (2, 800.0)]
    assert series(records, "predicted/latency_us") == list(enumerate(times))
    assert series(records, "outcomes/predicted") == [(0, 1), (1, 2), (2, 3)]


def test_a_prediction_never_enters_a_measured_series(make_record: Records) -> None:
    records = [
        make_record("predicted", trial=0, predicted_us=10.0),
        make_record("measured", trial=1, latency_us=1000.25, predicted_us=20.0, predictor="1"),
        make_record("rejected", trial=2),
    ]
    assert series(records, "best_us/measured") == [(1, 1000.2), (2, 1000.2)]
    assert series(records, "best_us/predicted") == [(0, 10.0), (1, 10.0), (2, 10.0)]


def test_a_final_is_a_series_of_its_own_and_counts_as_no_outcome(make_record: Records) -> None:
    records = [
        make_record("measured", trial=0, program_id="a", latency_us=100.0),
        make_record("measured", trial=1, program_id="b", latency_us=99.0, rival_us=99.1, gain_low_us=-1.0,
                    gain_high_us=1.0),
        make_record("measured", trial=2, program_id="b", latency_us=103.0, source="final"),
        make_record("measured", trial=3, program_id="a", latency_us=102.0, source="final"),
    ]  # fmt: skip
    assert series(records, "measured/latency_us") == [(0, 100.0), (1, 99.0)]
    assert series(records, "measured/final_us") == [(2, 103.0), (3, 102.0)]
    assert series(records, "best_us/measured") == [(0, 100.0), (1, 100.0), (2, 102.0), (3, 102.0)]
    assert series(records, "outcomes/measured") == [(0, 1), (1, 2)]


@given(st.lists(st.one_of(st.none(), st.floats(1, 1e6)), max_size=30))
def test_the_best_so_far_falls_and_ends_at_the_least(make_record: Records, times: list[float | None]) -> None:
    records = [
        make_record("rejected", trial=trial) if us is None else make_record(trial=trial, predicted_us=us)
        for trial, us in enumerate(times)
    ]
    best = [value for _, value in series(records, "best_us/predicted")]
    assert best == sorted(best, reverse=True)
    feasible = [us for us in times if us is not None]
    assert best[-1:] == ([curtailed(min(feasible))] if feasible else [])


def test_parameters_are_the_spec_and_the_environment_without_what_is_absent(
    make_record: Records, make_campaign: Campaigns
) -> None:
    spec = {"until": None, "fix": {"depth": "4"}, "decoder": {"layers": 2}, "bad key\n": "x" * 999, "list": [1, 2]}
    params = campaign_params(make_campaign(spec=json.dumps(spec)), [make_record(commit="abc")])
    assert params["fix.depth"] == "4"
    assert params["decoder.layers"] == "2"
    assert params["list"] == "[1, 2]"
    assert params["commit"] == "abc"
    assert params["measure"] == "predict"
    assert len(params["bad key_"]) == MAX_VALUE
    assert not {"until", "gpu_driver"} & params.keys()


def test_campaigns_of_one_name_in_two_stores_are_told_apart(make_campaign: Campaigns) -> None:
    changes: list[dict[str, Any]] = [{}, {"created_at": "2026-01-02T03:04:06+00:00"}, {"spec": '{"seed": 1}'}]
    keys = {campaign_key(make_campaign(**each)) for each in changes}
    assert len(keys) == 3
    assert campaign_key(make_campaign()) in keys


def test_a_trials_numbers_are_those_that_it_has(make_record: Records) -> None:
    names = {point.name for point in trial_points(make_record("measured", trial=4))}
    assert {"latency_us", "p10_us", "p90_us"} <= names
    assert "predicted_us" not in names


def test_predicted_numbers_have_no_more_digits_than_predictions_have(make_record: Records) -> None:
    record = make_record(trial=0, predicted_us=5040.63, floor_us=4480.6, floor_fraction=4480.6 / 5040.63)
    told = {point.name: point.value for point in (*campaign_points([record]), *trial_points(record))}
    wanted = {"best_us/predicted": 5040.0, "predicted/latency_us": 5040.0, "predicted_us": 5040.0,
              "tokens_per_s/predicted": 198.0, "floor_fraction/predicted": 0.889}  # fmt: skip
    assert wanted.items() <= told.items()


def test_passwords_are_not_shown() -> None:
    assert shown("https://me:secret@lab:5000/x") == "https://me:***@lab:5000/x"
    assert shown("sqlite:////tmp/a@b.db") == "sqlite:////tmp/a@b.db"


@given(st.text(alphabet=st.sampled_from("`a\n\x1b[]()<!#\u202e ")))
def test_no_name_ends_the_markdown_that_shows_it(name: str) -> None:
    span = code_span(name)
    fence = span[: len(span) - len(span.lstrip("`"))]
    inner = span[len(fence) : -len(fence)]
    assert span.isprintable()
    assert span.endswith(fence)
    assert len(fence) not in [len(run) for run in re.findall("`+", inner)]


def test_columns_are_of_the_kinds_that_are_there_and_measured_go_first() -> None:
    both = json.loads(columns({"best_us/predicted", "best_us/measured", "outcomes/predicted"}))["selectedColumns"]
    assert [each for each in both if each.startswith("metrics")] == [
        "metrics.`best_us/measured`", "metrics.`floor_fraction/measured`",
        "metrics.`best_us/predicted`", "metrics.`floor_fraction/predicted`",
    ]  # fmt: skip
    assert "metrics" not in columns({"predicted/latency_us"})
