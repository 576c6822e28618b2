"""The verdict on a program's logits: passed, by how much, and over which positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flywheel.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What logits may differ by and still pass."""

    max_rel_error: float
    min_top1_agreement: float
    ties_agree: bool
    """Whether a first choice agrees that the oracle puts within `max_rel_error` behind its own."""


# Half types: 8 round-offs (2^-8 for BF16, 2^-11 for F16). F32: the room that sums taken in another order need.
# Where activations are rounded to a half type, the first of two near-equal logits is rounding's choice: a correct
# program picks another one than the oracle at about 6 % of positions (bf16, random weights, llama3.2-1b and others).
TOLERANCE: Final = MappingProxyType(
    {
        "F32": Tolerance(1e-4, 1.0, ties_agree=False),
        "F16": Tolerance(8 * 2.0**-11, 1.0, ties_agree=True),
        "BF16": Tolerance(8 * 2.0**-8, 1.0, ties_agree=True),
    }
)
"""Tolerance by the name of the activations' dtype."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of logits with an oracle's.

    `max_rel_error` is the largest absolute error over the largest absolute logit of the oracle at that position,
    `top1_agreement` the share of positions with the same argmax (or a tie, where ties agree), `positions` those that
    were compared.
    Raises ValueError where `passed` is claimed against the numbers.
    """

    passed: bool
    max_abs_error: float
    max_rel_error: float
    top1_agreement: float
    tolerance: Tolerance
    positions: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        reason = self.reason
        if self.passed and reason is not None:
            raise ValueError(f"verdict cannot pass: {reason}")

    @property
    def error(self) -> float:
        """The worst figure that `bound` is for."""
        return self.max_rel_error

    @property
    def bound(self) -> float:
        """What `error` may be at most for the verdict to pass."""
        return self.tolerance.max_rel_error

    @property
    def where(self) -> str:
        """Where `error` was found."""
        return "logits"

    @property
    def reason(self) -> str | None:
        """Why the logits do not pass; None where nothing is wrong with them."""
        bound = self.tolerance
        if not any(position > 0 for position in self.positions):
            return f"positions {list(self.positions)} hold none after 0, where attention and RoPE cannot fail"
        if not self.max_abs_error < float("inf"):
            return f"max absolute error is {self.max_abs_error}, not a finite number"
        if not self.max_rel_error <= bound.max_rel_error:
            return f"max relative error {self.max_rel_error:.3g} exceeds {bound.max_rel_error:.3g} for {self.dtype}"
        if not self.top1_agreement >= bound.min_top1_agreement:
            return f"top-1 agreement {self.top1_agreement:.3g} is below {bound.min_top1_agreement:.3g} for {self.dtype}"
        return None


def judge(
    *, max_abs_error: float, max_rel_error: float, top1_agreement: float, positions: Sequence[int], dtype: str
) -> Verdict:
    """Verdict on errors taken over `positions`, by the TOLERANCE of `dtype`; NaN never passes.

    Raises UnknownNameError for a dtype without a tolerance.
    """
    if dtype not in TOLERANCE:
        raise UnknownNameError(f"dtype {dtype!r}: no tolerance; there is one for {', '.join(TOLERANCE)}")
    numbers = (max_abs_error, max_rel_error, top1_agreement, TOLERANCE[dtype], tuple(positions), dtype)
    return Verdict(Verdict(False, *numbers).reason is None, *numbers)
