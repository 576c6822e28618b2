from __future__ import annotations

from math import inf, nan

import pytest
from effort import sample

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.ir import TARGETS
from flywheel.lowering.lower import lower
from flywheel.measure.latency import (
    FITTED,
    GUESSED,
    SEEN,
    MeasuredLatency,
    PredictedLatency,
    band_of,
    curtailed,
    rounded,
)
from flywheel.search.workload import make_workload
from flywheel.store.schedule import Shipped, shipped_schedules


@pytest.mark.parametrize("p10, median, p90", [(0.0, 1.0, 2.0), (2.0, 1.0, 3.0), (1.0, 3.0, 2.0), (1.0, nan, 2.0)])
def test_measured_percentiles_are_positive_and_in_order(p10: float, median: float, p90: float) -> None:
    with pytest.raises(ValueError, match="finite, positive and in order"):
        MeasuredLatency(median, p10, p90, samples=10, warmup=2, l2_state="warm")


def test_a_measurement_has_samples() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        MeasuredLatency(2.0, 1.0, 3.0, samples=0, warmup=2, l2_state="flushed")


@pytest.mark.parametrize("batch_us", [0.0, -1.0, inf, nan])
def test_a_batch_is_finite_and_positive(batch_us: float) -> None:
    with pytest.raises(ValueError, match="us in a batch is not finite and positive"):
        MeasuredLatency(2.0, 1.0, 3.0, samples=1, warmup=0, l2_state="warm", batch_us=batch_us)


@pytest.mark.parametrize("latency_us", [0.0, -1.0, inf, nan])
def test_a_prediction_is_finite_and_positive(latency_us: float) -> None:
    with pytest.raises(ValueError, match="not finite and positive"):
        PredictedLatency(latency_us, "1")


@pytest.mark.parametrize("each", sample(shipped_schedules()), ids=lambda each: each.stem)
def test_what_was_measured_lies_in_the_range_of_its_prediction(each: Shipped) -> None:
    asked = each.schedule
    weights = None if asked.weights == asked.dtype else asked.weights
    workload = make_workload(asked.model, asked.gpu, asked.dtype, asked.context, asked.batch, weights)
    predicted_us = predict(lower(workload.graph, asked.config, workload.target)).latency_us
    low, high = band_of(asked.gpu, MODEL_VERSION).around(predicted_us)
    assert low <= each.median_us <= high


def test_a_gpu_on_which_nothing_was_measured_has_the_widest_range() -> None:
    assert {band_of(gpu, MODEL_VERSION) for gpu in TARGETS if gpu not in ("h100", "h200")} == {GUESSED}
    assert band_of("2xh200", MODEL_VERSION) == band_of("h100", MODEL_VERSION) == SEEN
    assert band_of("l4", f"{MODEL_VERSION}+cal:01234567") == FITTED
    assert GUESSED.high / GUESSED.low > FITTED.high / FITTED.low
    assert [band.basis for band in (GUESSED, SEEN, FITTED)] == ["scaled", "checked", "calibrated"]


@pytest.mark.parametrize(
    ("value", "text"), [(3472.4, "3,470"), (999.6, "1,000"), (52.46, "52.5"), (0.012345, "0.0123"), (19047.2, "19,000")]
)
def test_a_prediction_is_shown_with_three_digits(value: float, text: str) -> None:
    assert rounded(value) == text
    assert curtailed(value) == float(text.replace(",", ""))
