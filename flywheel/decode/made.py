"""A token that a launch made, and its log-probabilities; the error where it made none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flywheel.errors import NonFiniteError

Explain = Callable[[Sequence[int]], str]
"""What an error about a text says of the first tensor that is not finite; empty where nothing is known."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities from the unmodified logits, whatever the sampling: `chosen` is that of the token that
    was made, `top` are (token id, log-probability) of the likeliest tokens, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Made(NamedTuple):
    """A token that a launch made for the sequence of a row. `logprobs` is None unless its sampling asks for them."""

    row: int
    token: int
    logprobs: Logprobs | None = None


def not_finite(text: Sequence[int], explain: Explain | None, whose: str = "the") -> NonFiniteError:
    """The error that ends a sequence whose logits after `text` are not finite. `whose` logits they are."""
    told = "" if explain is None else explain(text)
    return NonFiniteError(f"position {len(text) - 1}: {whose} logits are not finite{told}")
