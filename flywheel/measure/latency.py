"""Latencies, measured and predicted. They are two types, so that neither can stand for the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Final, Literal

L2State = Literal["clean", "flushed", "warm"]
"""The L2 cache before each sample: emptied by reads (clean), emptied by writes that may still be on their way to memory
(flushed), or as the sample before left it (warm). Measurements use a clean cache."""


def tokens_per_s(latency_us: float, batch: int) -> float:
    """Tokens a second of all `batch` sequences together, where a step that makes one of each takes `latency_us`."""
    return batch * 1e6 / latency_us


_DIGITS: Final = 3
"""Significant digits of a prediction that people are shown. Schedules of a search differ by less than a percent."""


def rounded(predicted: float) -> str:
    """A predicted number as text with no more digits than a prediction has: `3,470`, `0.0123`."""
    return f"{curtailed(predicted):,.{max(_place(predicted), 0)}f}"


def curtailed(predicted: float) -> float:
    """A predicted number with no more digits than a prediction has: 3470.0, 0.0123."""
    return round(predicted, _place(predicted))


def _place(predicted: float) -> int:
    """The decimals that a predicted number is rounded to."""
    return _DIGITS - 1 - floor(log10(predicted)) if predicted > 0.0 else 0


@dataclass(frozen=True, slots=True)
class GpuState:
    """The clocks, power and temperature of a GPU at one moment; None where unknown.

    `throttle` names the reasons for lowered clocks, separated by commas, or is "none". `strangers` is the number of
    other processes that compute on the GPU.
    """

    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: str | None = None
    strangers: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredLatency:
    """The time of one launch over `samples` runs on a GPU, after `warmup` runs that do not count.

    `batch_us` is the time of one launch among many back to back, and `gpu_state` the GPU's state during them. Raises
    ValueError unless 0 < p10_us <= median_us <= p90_us, all finite, over at least one sample. `batch_us`, if given,
    must be finite and positive.
    """

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    warmup: int
    l2_state: L2State
    batch_us: float | None = None
    gpu_state: GpuState | None = None

    def __post_init__(self) -> None:
        if not (0.0 < self.p10_us <= self.median_us <= self.p90_us and isfinite(self.p90_us)):
            raise ValueError(
                f"measured latency: p10 {self.p10_us}, median {self.median_us}, p90 {self.p90_us} us "
                "are not finite, positive and in order"
            )
        if self.samples < 1 or self.warmup < 0:
            raise ValueError(f"measured latency: {self.samples} samples after {self.warmup} warm-up runs; need >= 1")
        if self.batch_us is not None and not (self.batch_us > 0.0 and isfinite(self.batch_us)):
            raise ValueError(f"measured latency: {self.batch_us} us in a batch is not finite and positive")


@dataclass(frozen=True, slots=True)
class PredictedLatency:
    """The time of one launch by a cost model. Raises ValueError unless `latency_us` is finite and positive."""

    latency_us: float
    model_version: str

    def __post_init__(self) -> None:
        if not (self.latency_us > 0.0 and isfinite(self.latency_us)):
            raise ValueError(f"predicted latency: {self.latency_us} us is not finite and positive")
