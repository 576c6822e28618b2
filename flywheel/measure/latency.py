"""Latencies, measured and predicted, and how far predictions are off. They are two types, so that neither can stand for
the other."""

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


RESOLUTION: Final = 0.005
"""Two predictions that differ by a smaller share say nothing of which schedule is faster. Among the nearly equal
schedules of a search, the median error is 0.5 to 1.8 % in bf16. Source: results/calibration.txt."""


def difference(us: float, base_us: float) -> str:
    """The difference of a prediction to `base_us`, another one, as text with no more digits than predictions have:
    `+320`; `about 0` where it says nothing."""
    if abs(us) < RESOLUTION * base_us:
        return "about 0"
    place = _place(base_us)
    return f"{round(us, place):+,.{max(place, 0)}f}"


@dataclass(frozen=True, slots=True)
class Band:
    """A measured time is expected within `low` and `high` times the predicted one. `why` says what that rests on.

    `basis`, in one word: constants were `calibrated` on such a GPU, predictions were `checked` by measurements on such
    GPUs, or constants are `scaled` from another GPU's and nothing was ever measured on such a one.
    """

    low: float
    high: float
    why: str
    basis: Literal["calibrated", "checked", "scaled"]

    def around(self, predicted_us: float) -> tuple[float, float]:
        """The range of times in us."""
        return predicted_us * self.low, predicted_us * self.high

    def words(self, predicted_us: float) -> str:
        """The range for people: `measured perhaps 2,990 to 3,960 us`."""
        low, high = (rounded(end) for end in self.around(predicted_us))
        return f"measured perhaps {low} to {high} us"


SEEN: Final = Band(0.86, 1.14, "predictions for 47 schedules of H100s and H200s were off by up to so much", "checked")
"""The extremes of the shipped schedules. Source: results/shipped_predicted.txt."""
FITTED: Final = Band(0.85, 1.17, "a calibration is off by up to so much for nine of ten schedules", "calibrated")
"""Random schedules outside a fit. Source: results/calibration.txt."""
GUESSED: Final = Band(
    0.7, 1.4, "a guess: nothing was measured on such a GPU, and its constants are scaled from an H200's", "scaled"
)

_MEASURED_ON: Final = frozenset({"h100", "h200"})


def band_of(gpu: str, predictor: str) -> Band:
    """The band of predictions for the GPU, by its name in stores (`2xh200` is two), and a version of the cost model."""
    if "+cal:" in predictor:
        return FITTED
    return SEEN if gpu.rpartition("x")[2] in _MEASURED_ON or gpu in _MEASURED_ON else GUESSED
