from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from flywheel.measure.latency import MeasuredLatency, PredictedLatency
from flywheel.measure.outcome import (
    OUTCOME_NAMES,
    Crashed,
    Implausible,
    Incorrect,
    Measured,
    NoMemory,
    Predicted,
    Rejected,
    TimedOut,
    TrialOutcome,
    outcome_name,
)
from flywheel.measure.verdict import judge

LATENCY = MeasuredLatency(2.0, 1.0, 3.0, samples=10, warmup=2, l2_state="warm")
PASSED = judge(error=0.0, where="logits", positions=(0, 5), dtype="BF16")
FAILED = replace(PASSED, passed=False, error=1.0)


def test_a_latency_cannot_exist_without_a_passing_verdict() -> None:
    assert Measured(LATENCY, PASSED).latency is LATENCY
    with pytest.raises(ValueError, match="did not pass"):
        Measured(LATENCY, FAILED)


def test_a_verdict_that_is_merely_truthy_does_not_pass() -> None:
    with pytest.raises(ValueError, match="did not pass"):
        Measured(LATENCY, replace(PASSED, passed=1))  # type: ignore[arg-type]


def test_every_outcome_has_its_name() -> None:
    outcomes: list[TrialOutcome] = [
        Measured(LATENCY, PASSED),
        Predicted(PredictedLatency(1.0, "1")),
        Rejected(("smem",), "too large"),
        Incorrect(FAILED, "wrong"),
        Implausible(1.0, 2.0),
        TimedOut(5.0, "no token"),
        Crashed("gone", transient=True),
        NoMemory("9 GB requested, 1 GB free"),
    ]
    assert tuple(outcome_name(outcome) for outcome in outcomes) == OUTCOME_NAMES
    assert tuple(type(outcome) for outcome in outcomes) == get_args(TrialOutcome)
