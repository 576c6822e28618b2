"""A token that a launch made, and how likely it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of shares that the logits give as they are, whatever the sampling: `chosen` is that of the
    token that was made, `top` those of the likeliest, as (token id, logarithm), likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Made(NamedTuple):
    """A token that a launch made for the sequence of a row; `logprobs` where its sampling asks for them."""

    row: int
    token: int
    logprobs: Logprobs | None = None
