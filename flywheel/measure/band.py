"""How far predictions are off: a range around each, by what was measured of its GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from flywheel.measure.latency import rounded

RESOLUTION: Final = 0.005
"""Two predictions that differ by a smaller share say nothing of which schedule is faster. Among the nearly equal
schedules of a search, the median error is 0.5 to 1.8 % in bf16. Source: results/calibration.txt."""


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
        """The range for people: `measured perhaps 2,990 to 3,920 us`."""
        low, high = (rounded(end) for end in self.around(predicted_us))
        return f"measured perhaps {low} to {high} us"


SEEN: Final = Band(0.86, 1.13, "predictions for 34 schedules of H100s and H200s were off by up to so much", "checked")
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
