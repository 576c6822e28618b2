from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from flywheel.measure.comparison import Comparison, Entry, comparison_document, reason_of, standing
from flywheel.measure.latency import GpuState, MeasuredLatency
from flywheel.measure.outcome import Implausible, Incorrect, Measured
from flywheel.measure.verdict import judge

PASSED = judge(error=0.01, where="logits", positions=(0, 511), dtype="BF16")
WRONG = judge(error=math.nan, where="logits", positions=(511,), dtype="BF16")


def entry(name: str, median_us: float, **changes: Any) -> Entry:
    state = GpuState(sm_clock_mhz=1980, throttle="none")
    latency = MeasuredLatency(median_us, median_us - 1, median_us + 2, 40, 3, "flushed", median_us - 3, state)
    times = ((median_us,) * 20, (median_us + 1,) * 20)
    return replace(Entry(name, f"how {name} runs", Measured(latency, PASSED), times, (median_us - 3,) * 2), **changes)


OURS, SLOWER = entry("ours", 500.0), entry("cublas", 1000.0)
FAILED = Entry("compile", "compiled", Incorrect(WRONG, "max absolute error is nan"))
COMPARISON = Comparison(512, 2_000_000_000, 400.0, 450.0, (OURS, SLOWER, FAILED))


def test_who_takes_half_the_time_is_twice_as_fast() -> None:
    found = standing(COMPARISON, OURS)
    assert found is not None
    assert dict(found.speedups) == {"cublas": 2.0}  # nothing is faster than what has no time
    slower = standing(COMPARISON, SLOWER)
    assert slower is not None
    assert dict(slower.speedups) == {"ours": 0.5}


def test_fractions_are_of_the_median_and_the_rate_is_of_the_weights() -> None:
    found = standing(COMPARISON, OURS)
    assert found is not None
    assert (found.floor_fraction, found.ceiling_fraction) == (0.8, 0.9)
    assert found.read_gbs == pytest.approx(4000.0)


def test_each_contestant_has_a_share_of_the_bytes_that_it_reads_itself() -> None:
    """Rivals that dequantise read more weights; everybody reads the caches."""
    weights = COMPARISON.weight_bytes
    longer = replace(COMPARISON, cache_bytes=weights // 4, entries=(OURS, replace(SLOWER, weight_bytes=4 * weights)))
    ours, slower = (standing(longer, entry) for entry in longer.entries)
    assert ours is not None
    assert slower is not None
    assert ours.read_bytes == weights + weights // 4
    assert ours.ceiling_fraction == pytest.approx(0.9 * 1.25)
    assert slower.read_bytes == 4 * weights + weights // 4
    before = standing(COMPARISON, SLOWER)
    assert before is not None
    assert slower.floor_fraction == pytest.approx(before.floor_fraction * 4.25)


def test_who_is_wrong_stands_nowhere() -> None:
    assert standing(COMPARISON, FAILED) is None
    assert (FAILED.latency, FAILED.verdict) == (None, WRONG)


@pytest.mark.parametrize("times", [{"times_us": ((1.0,),)}, {"batches_us": (1.0,)}])
def test_times_do_not_come_without_a_latency(times: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="compile: incorrect, but has times"):
        replace(FAILED, **times)


def test_an_impossible_time_says_so_and_has_no_verdict() -> None:
    impossible = Entry("ours", "too fast", Implausible(300.0, 400.0))
    assert impossible.verdict is None
    assert reason_of(impossible.outcome) == "300.0 us is below the weight floor of 400.0 us"
    assert reason_of(OURS.outcome) is None


def test_the_document_is_json_with_every_sample_and_null_for_what_is_not_there() -> None:
    document = json.loads(json.dumps(comparison_document(COMPARISON), allow_nan=False))
    assert (document["context"], document["floor_us"], document["ceiling_us"]) == (512, 400.0, 450.0)
    ours, slower, failed = document["contestants"]
    assert (ours["median_us"], ours["p10_us"], ours["p90_us"], ours["batch_us"]) == (500.0, 499.0, 502.0, 497.0)
    assert [len(samples) for samples in ours["times_us"]] == [20, 20]
    assert ours["speedups"] == {"cublas": 2.0}
    assert ours["gpu_state"]["sm_clock_mhz"] == 1980
    assert ours["verdict"]["positions"] == [0, 511]
    assert (failed["outcome"], failed["reason"]) == ("incorrect", "max absolute error is nan")
    assert failed["verdict"]["error"] is None
    assert (failed["median_us"], failed["times_us"], failed["speedups"]) == (None, [], {})
    assert failed.keys() == ours.keys() == slower.keys()
