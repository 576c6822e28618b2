"""numpy draws tokens as often as torch says that a request's distribution has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from effort import examples
from torch import Tensor

from flywheel.decode.choices import choose
from flywheel.runtime.sequences import GREEDY, Sampling
from flywheel.runtime.session import draw

VOCAB = 50
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 2
SEEN = torch.arange(VOCAB) % 7 == 3
DRAWS = examples(20_000, 6000)
LEAST = 5.0
"""Draws that are expected of a class; rarer tokens are one class together."""


def shares_by_torch(sampling: Sampling) -> Tensor:
    """The distribution, by torch's own softmax, largest values and sorting."""
    scores = LOGITS.double()
    penalty = sampling.repetition_penalty
    scores = torch.where(SEEN, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    scores = scores / sampling.temperature
    kept = torch.ones(VOCAB, dtype=torch.bool)
    if sampling.top_k:
        kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, scores.topk(sampling.top_k).indices, True)
    shares = torch.softmax(scores, 0)
    kept &= shares >= sampling.min_p * shares.max()
    shares = torch.softmax(scores.masked_fill(~kept, -torch.inf), 0)
    ordered, order = shares.sort(descending=True)
    shares[order[ordered.cumsum(0) - ordered >= sampling.top_p]] = 0.0
    return shares / shares.sum()


def counts(sampling: Sampling) -> Tensor:
    """How often numpy draws each token."""
    logits, seen = LOGITS.numpy(), SEEN.numpy()
    drawn = [draw(logits, seen, sampling, position) for position in range(DRAWS)]
    return torch.tensor(drawn).bincount(minlength=VOCAB).double()


def is_distributed(counted: Tensor, shares: Tensor) -> bool:
    """Whether chi-square of the counts is below what 0.05 % of right ones exceed."""
    expected = shares * DRAWS
    often = expected >= LEAST
    counted = torch.cat([counted[often], counted[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    counted, expected = counted[expected > 0], expected[expected > 0]
    square = float(((counted - expected) ** 2 / expected).sum())
    from scipy.stats import chi2  # a second, for those who need not wait for it

    return square < chi2.isf(5e-4, len(expected) - 1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, seed=7),
        Sampling(temperature=2.0, top_k=9),
        Sampling(temperature=1.0, top_p=0.7, seed=3),
        Sampling(temperature=1.0, min_p=0.1, seed=-1),
        Sampling(temperature=1.3, repetition_penalty=1.8, seed=5),
        Sampling(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.4, seed=2**64 - 1),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_torchs_shares_say(sampling: Sampling) -> None:
    counted, shares = counts(sampling), shares_by_torch(sampling)
    assert not counted[shares == 0.0].any()
    assert is_distributed(counted, shares)


@pytest.mark.parametrize(
    "other",
    [
        Sampling(temperature=1.1), Sampling(temperature=1.0, top_p=0.97), Sampling(temperature=1.0, min_p=0.01),
        Sampling(temperature=1.0, repetition_penalty=1.1),
    ],
    ids=str,
)  # fmt: skip
def test_another_distribution_is_told_from_the_right_one(other: Sampling) -> None:
    assert not is_distributed(counts(other), shares_by_torch(Sampling(temperature=1.0)))


def test_what_is_not_drawn_is_torchs_choice() -> None:
    for sampling in (GREEDY, Sampling(repetition_penalty=3.0)):
        assert draw(LOGITS.numpy(), SEEN.numpy(), sampling, 0) == int(choose(LOGITS, SEEN, sampling, 0))


def test_a_seed_and_a_position_decide_the_draw() -> None:
    def drawn(seed: int) -> list[int]:
        sampling = Sampling(temperature=3.0, seed=seed)
        return [draw(LOGITS.numpy(), SEEN.numpy(), sampling, position) for position in range(50)]

    first = drawn(5)
    np.random.default_rng().random(3)
    assert first == drawn(5) != drawn(6)
    assert len(set(first)) > 5
