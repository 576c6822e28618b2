"""Chooses a token after one launch as a Sampling asks, without torch. Draws have the same distribution as those of
`choices`, but use other random numbers."""

from __future__ import annotations

from math import log
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.decode.made import Logprobs
from flywheel.decode.sampling import Sampling
from flywheel.ir import NO_TOKEN

Floats = npt.NDArray[np.float32]

_SEEDS: Final = 2**64

_LEAST: Final = float(np.finfo(np.float64).tiny)
"""Least exponential number to divide by; a drawn one can be 0."""


def draw(logits: Floats, seen: npt.NDArray[np.bool_], sampling: Sampling, position: int) -> int:
    """The token after `logits` [vocab] at a position; NO_TOKEN where the logits are not finite. `seen` [vocab] marks
    tokens of the text."""
    with np.errstate(invalid="ignore", over="ignore"):  # the largest score shows it
        race = _race(logits, seen, sampling, position)
    token = int(race.argmax())
    return token if np.isfinite(race[token]) else NO_TOKEN


def _race(
    logits: Floats, seen: npt.NDArray[np.bool_], sampling: Sampling, position: int
) -> npt.NDArray[np.float64]:
    """A score for each token, of which the largest wins; NaN counts as the largest."""
    scores = logits.astype(np.float64)
    if sampling.repetition_penalty != 1.0:
        penalised = np.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
        scores = np.where(seen, penalised, scores)
    if sampling.is_greedy:
        return scores
    warm = scores / sampling.temperature
    if 0 < sampling.top_k < len(warm):
        least = np.partition(warm, -sampling.top_k)[-sampling.top_k]
        warm = np.where(warm < least, -np.inf, warm)
    if sampling.min_p > 0.0:
        warm = np.where(warm < warm.max() + log(sampling.min_p), -np.inf, warm)
    shares = np.exp(warm - warm.max())
    shares /= shares.sum()
    if sampling.top_p < 1.0:
        order = np.argsort(-shares, kind="stable")
        before = np.cumsum(shares[order]) - shares[order]
        shares[order[before >= sampling.top_p]] = 0.0
    dice = np.random.default_rng([sampling.seed % _SEEDS, position])
    race: npt.NDArray[np.float64] = shares / np.maximum(dice.exponential(size=len(shares)), _LEAST)
    return race


def logprobs_of(logits: Floats, token: int, sampling: Sampling) -> Logprobs | None:
    """The log-probabilities that a sampling asks for, as `logprobs.read_row`; None if it asks for none."""
    if sampling.logprobs is None:
        return None
    wide = logits.astype(np.float64)
    shares = wide - wide.max()
    shares -= np.log(np.exp(shares).sum())
    best = [int(each) for each in np.argsort(-shares, kind="stable")[: sampling.logprobs] if shares[each] > -np.inf]
    return Logprobs(float(shares[token]), tuple([(each, float(shares[each])) for each in best]))
