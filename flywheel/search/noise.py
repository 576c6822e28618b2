"""Whether a difference of latencies is one: bootstrap intervals of samples that were taken in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flywheel.measure.contest import Rounds

CONFIDENCE: Final = 0.99
"""Of an interval. Rounds are few for a bootstrap: where they differ most, it holds in some 0.96 of all cases
(experiments/aa_noise.py)."""

_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Gain:
    """How much less a program takes than its rival, whose median is `rival_us`: bounds in us."""

    rival_us: float
    low_us: float
    high_us: float

    @property
    def is_one(self) -> bool:
        """Whether the program is faster, whatever the noise."""
        return self.low_us > 0.0


def gain(program: Rounds, rival: Rounds, seed: int) -> Gain:
    """The CONFIDENCE interval of the median difference between samples that were taken side by side.

    Rounds are drawn first, then samples within each: where a program was loaded is common to a whole round. Rounds are
    cut to the shortest. The same samples and seed give the same interval.
    """
    length = min(map(len, (*program, *rival)))
    ours, theirs = (np.array([samples[:length] for samples in rounds]) for rounds in (program, rival))
    gains = theirs - ours
    rounds, samples = gains.shape
    chance = np.random.default_rng(seed)
    drawn = chance.integers(rounds, size=(_RESAMPLES, rounds, 1))
    within = chance.integers(samples, size=(_RESAMPLES, rounds, samples))
    medians = np.median(gains[drawn, within].reshape(_RESAMPLES, -1), axis=1)
    low, high = np.quantile(medians, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Gain(float(np.median(theirs)), float(low), float(high))
