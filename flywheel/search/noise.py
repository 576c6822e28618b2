"""Telling differences of latencies from noise: bootstrap intervals of samples that were taken in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flywheel.measure.outcome import Rounds

CONFIDENCE: Final = 0.99
"""The nominal confidence of an interval. A bootstrap of few rounds is less sure: if rounds differ much, the interval
holds in some 0.96 of all cases (experiments/aa_noise.py)."""

_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster a program is than its rival: bounds in us. The rival's median latency is `rival_us`."""

    rival_us: float
    low_us: float
    high_us: float

    @property
    def is_one(self) -> bool:
        """Whether the program is faster, whatever the noise."""
        return self.low_us > 0.0


def gain(program: Rounds, rival: Rounds, seed: int) -> Gain:
    """The CONFIDENCE interval of the median difference between samples that were taken side by side.

    The bootstrap draws rounds, then samples within each round, because all samples of a round share the place at which
    the program was loaded. Rounds are cut to the shortest. The same samples and seed give the same interval.
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
