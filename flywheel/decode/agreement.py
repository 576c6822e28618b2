"""What quantising a model costs: its oracle's logits beside those of the same model as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flywheel.decode.source import Weights
from flywheel.ir import DType
from flywheel.models.eager import EagerDecoder
from flywheel.models.spec import DecoderSpec
from flywheel.tensors import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over `tokens` of a text: the mean divergence (KL, in nats) of the quantised model's next token from the other's,
    the largest, and the share of tokens at which both have the same first choice."""

    tokens: int
    mean_kl: float
    largest_kl: float
    same_choice: float


def agreement(
    spec: DecoderSpec, quantised: Weights, plain: Weights, dtype: DType, tokens: Sequence[int]
) -> Agreement:
    """Of two sets of weights of one model, on the device where they are, each token behind all before it. Raises
    UsageError for a text that the model does not reach, and for tokens that it does not have."""
    device = next(iter(plain.values())).device
    both = [EagerDecoder(spec, each, TORCH_DTYPES[dtype], len(tokens), device) for each in (plain, quantised)]
    divergences, same = [], 0
    for position, token in enumerate(tokens):
        wanted, found = (decoder.step(token, position).double() for decoder in both)
        expected = wanted.log_softmax(-1)
        divergences.append(float((expected.exp() * (expected - found.log_softmax(-1))).sum().clamp(min=0.0)))
        same += int(torch.equal(wanted.argmax(), found.argmax()))
    return Agreement(len(tokens), sum(divergences) / len(tokens), max(divergences), same / len(tokens))
