from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.measure.environment import Environment
from flywheel.measure.latency import MeasuredLatency, PredictedLatency
from flywheel.measure.outcome import Crashed, Implausible, Incorrect, Measured, Predicted, Rejected, TimedOut
from flywheel.measure.record import TrialRecord
from flywheel.measure.verdict import BOUND, Verdict
from flywheel.search.rows import to_record
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials.evaluate import Evaluation

SPEC = CampaignSpec("small", "few", context=64, measure="predict", sampler="random", seed=3)
CONFIG = ScheduleConfig(sm_assignment={3: 1}, tiling={"gemv": {"N_tile": 32}})
PASSED = Verdict(True, 0.0, BOUND["BF16"], "logits", (0, 1), "BF16")
FAILED = Verdict(False, 9.0, BOUND["BF16"], "logits", (0, 1), "BF16")


def row(evaluation: Evaluation, environment: Environment, source: str = "search") -> TrialRecord:
    return to_record(
        "toy", 5, SPEC, CONFIG, evaluation, environment,
        source=source, ask_s=0.25, created_at="2026-01-02T03:04:05.678+00:00",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            Measured(MeasuredLatency(50.0, 49.0, 52.0, 100, 10, "flushed"), PASSED),
            {"outcome": "measured", "latency_us": 50.0, "p10_us": 49.0, "p90_us": 52.0, "floor_fraction": 0.5},
        ),
        (
            Predicted(PredictedLatency(40.0, "7")),
            {"outcome": "predicted", "predicted_us": 40.0, "predictor": "7", "floor_fraction": 0.625},
        ),
        (Rejected(("a", "b"), "no"), {"outcome": "rejected", "reason": "[a, b] no"}),
        (Incorrect(FAILED, "argmax differs"), {"outcome": "incorrect", "reason": "argmax differs"}),
        (Implausible(12.25, 25.0), {"outcome": "implausible", "reason": "12.2 us is less than the floor of 25.0 us"}),
        (TimedOut(2.0, "no answer"), {"outcome": "timed_out", "reason": "no answer"}),
        (Crashed("died", transient=False), {"outcome": "crashed", "reason": "died"}),
    ],
)
def test_every_outcome_has_its_columns(outcome: Any, expected: dict[str, Any], environment: Environment) -> None:
    record = row(Evaluation(outcome, "0123", 7, 4096, 25.0, 0.1, 0.2, 0.3), environment)
    names = ("reason", "predicted_us", "predictor", "latency_us", "p10_us", "p90_us", "floor_fraction")
    assert {name: getattr(record, name) for name in ("outcome", *names)} == {**dict.fromkeys(names), **expected}
    assert (record.program_id, record.tasks, record.weight_bytes, record.floor_us) == ("0123", 7, 4096, 25.0)
    assert (record.ask_s, record.lower_s, record.validate_s, record.measure_s) == (0.25, 0.1, 0.2, 0.3)
    assert (record.campaign, record.trial, record.source, record.host) == ("toy", 5, "search", "lab")


def test_what_failed_is_of_no_fraction_of_the_floor_whatever_was_predicted_of_it(environment: Environment) -> None:
    failed = Evaluation(TimedOut(2.0, "no answer"), "0123", 7, 4096, 25.0, predicted=PredictedLatency(40.0, "7"))
    record = row(failed, environment)
    assert (record.predicted_us, record.floor_us, record.floor_fraction) == (40.0, 25.0, None)


def test_a_row_holds_the_config_itself(environment: Environment) -> None:
    record = row(Evaluation(Rejected(("config",), "no")), environment)
    assert config_from_dict(json.loads(record.config)) == CONFIG
    assert record.config_id == CONFIG.config_id
    assert (record.program_id, record.floor_us, record.floor_fraction) == (None, None, None)


def test_an_answer_from_the_store_keeps_its_numbers_and_tells_its_source(environment: Environment) -> None:
    first = row(Evaluation(Predicted(PredictedLatency(40.0, "7")), "0123", 7, 4096, 25.0), environment, "seed")
    again = row(Evaluation(first, "0123", 7, 4096, 25.0), environment)
    assert (first.source, again.source) == ("seed", "store")
    assert (again.outcome, again.predicted_us, again.predictor) == ("predicted", 40.0, "7")
    assert again.floor_fraction == first.floor_fraction == 0.625


def test_a_judged_row_keeps_the_figures_of_its_verdict(environment: Environment) -> None:
    latency = MeasuredLatency(50.0, 49.0, 52.0, 100, 10, "flushed")
    outcomes = (Measured(latency, PASSED), PASSED), (Incorrect(FAILED, "argmax differs"), FAILED)
    for outcome, verdict in outcomes:
        record = row(Evaluation(outcome, "0123"), environment)
        figures = (record.verdict_error, record.verdict_bound, record.verdict_where)
        assert figures == (verdict.error, verdict.bound, verdict.where)


def test_the_commit_is_that_of_the_process_that_measured(environment: Environment) -> None:
    latency = MeasuredLatency(50.0, 49.0, 52.0, 100, 10, "flushed")
    there = replace(environment, commit="b" * 40, kernels="feed", host="elsewhere")
    measured = row(Evaluation(Measured(latency, PASSED), "0123", environment=there), environment)
    assert (measured.commit, measured.kernels, measured.host) == ("b" * 40, "feed", "elsewhere")
    answered = row(Evaluation(measured, "0123"), environment)
    assert (answered.source, answered.commit) == ("store", "b" * 40)
    assert row(Evaluation(Predicted(PredictedLatency(40.0, "7")), "0123"), environment).commit == environment.commit


def test_a_row_is_of_the_batch_that_was_searched(environment: Environment) -> None:
    evaluation = Evaluation(Predicted(PredictedLatency(40.0, "7")), "0123")
    record = to_record(
        "toy", 5, replace(SPEC, batch=4), CONFIG, evaluation, environment,
        source="search", ask_s=None, created_at="2026-01-02T03:04:05.678+00:00",
    )  # fmt: skip
    assert (record.batch, row(evaluation, environment).batch) == (4, 1)
