"""A token that a launch made, and its log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
