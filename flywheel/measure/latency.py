"""Latencies, measured and predicted: two types, so that neither can stand in for the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

L2State = Literal["flushed", "warm"]
"""Whether the L2 cache was emptied before each sample, or left as the sample before had it."""


@dataclass(frozen=True, slots=True)
class MeasuredLatency:
    """Time of one launch over `samples` runs on a GPU, after `warmup` runs that do not count.

    Raises ValueError unless 0 < p10_us <= median_us <= p90_us, all finite, over at least one sample.
    """

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    warmup: int
    l2_state: L2State

    def __post_init__(self) -> None:
        if not (0.0 < self.p10_us <= self.median_us <= self.p90_us and isfinite(self.p90_us)):
            raise ValueError(
                f"measured latency: p10 {self.p10_us}, median {self.median_us}, p90 {self.p90_us} us "
                "are not finite, positive and in order"
            )
        if self.samples < 1 or self.warmup < 0:
            raise ValueError(f"measured latency: {self.samples} samples after {self.warmup} warm-up runs; need >= 1")


@dataclass(frozen=True, slots=True)
class PredictedLatency:
    """What a cost model says one launch takes. Raises ValueError unless `latency_us` is finite and positive."""

    latency_us: float
    model_version: str

    def __post_init__(self) -> None:
        if not (self.latency_us > 0.0 and isfinite(self.latency_us)):
            raise ValueError(f"predicted latency: {self.latency_us} us is not finite and positive")
