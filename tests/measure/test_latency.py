from __future__ import annotations

from math import inf, nan

import pytest

from flywheel.measure.latency import MeasuredLatency, PredictedLatency


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
