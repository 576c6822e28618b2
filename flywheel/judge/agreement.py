"""Accuracy cost of quantisation: the oracle's logits for the quantised and the original weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flywheel.decode.source import Weights
from flywheel.errors import NonFiniteError
from flywheel.ir import DType
from flywheel.models.oracle import EagerDecoder
from flywheel.models.spec import DecoderSpec
from flywheel.tensors import TORCH_DTYPES, all_finite


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a quantised model is from the original one over `tokens` tokens of a text: the mean and the largest KL
    divergence of the next token's distribution, in nats, and the share of tokens at which both models have the same
    first choice."""

    tokens: int
    mean_kl: float
    largest_kl: float
    same_choice: float


def agreement(
    spec: DecoderSpec, quantised: Weights, plain: Weights, dtype: DType, tokens: Sequence[int]
) -> Agreement:
    """Compare two sets of weights of one model, on the device that holds them, at every token of a text. Raises
    UsageError for a text longer than the model's context, and for tokens outside its vocabulary, and NonFiniteError for
    logits that are not finite."""
    device = next(iter(plain.values())).device
    both = [EagerDecoder(spec, each, TORCH_DTYPES[dtype], len(tokens), device) for each in (plain, quantised)]
    divergences, same = [], 0
    for position, token in enumerate(tokens):
        wanted, found = (decoder.step(token, position).double() for decoder in both)
        for whose, logits in (("unquantised", wanted), ("quantised", found)):
            if not all_finite([logits]):
                raise NonFiniteError(f"position {position}: logits of the {whose} model are not finite")
        expected = wanted.log_softmax(-1)
        divergences.append(float((expected.exp() * (expected - found.log_softmax(-1))).sum().clamp(min=0.0)))
        same += int(torch.equal(wanted.argmax(), found.argmax()))
    return Agreement(len(tokens), sum(divergences) / len(tokens), max(divergences), same / len(tokens))
