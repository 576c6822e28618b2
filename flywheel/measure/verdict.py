"""The verdict on a program: whether it passed, its worst error, and the place of that error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import UnknownNameError

BOUND: Final[Mapping[str, float]] = MappingProxyType({"F32": 1e-4, "F16": 1.9e-3, "BF16": 1.5e-2})
"""The largest allowed error of a tensor against the oracle's result for the same operands, by the dtype of the
activations."""

FREE_RUNNING: Final[Mapping[str, float]] = MappingProxyType({"F32": 1e-3, "F16": 0.02, "BF16": 0.125})
"""The largest allowed error of logits, relative to the largest logit, after a decode step whose operations all ran on
their own values.

Rounding accumulates over the layers. This bounds programs that show no other tensors, and decides which tokens tie.
"""

REPEATED: Final = 1 / 16
"""Share of BOUND by which the logits of two launches of one program may differ."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst of all comparisons with an oracle.

    `error` is that comparison's error, `where` its position, row and tensor, and `bound` the largest error allowed.
    `error` is inf if a tensor holds NaN or infinity, or differs where it must be exact. Raises ValueError if `passed`
    contradicts the numbers.
    """

    passed: bool
    error: float
    bound: float
    where: str
    positions: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        reason = self.reason
        if self.passed and reason is not None:
            raise ValueError(f"verdict cannot pass: {reason}")
        if not self.passed and reason is None:
            raise ValueError(f"verdict must pass: error {self.error:.3g} is within {self.bound:.3g}")

    @property
    def reason(self) -> str | None:
        """The reason why the program does not pass; None where it passes."""
        if not any(position > 0 for position in self.positions):
            return f"positions {list(self.positions)} hold none after 0, where attention and RoPE cannot fail"
        if not isfinite(self.error):
            return f"{self.where}: holds NaN or infinity, or not what it must be exactly"
        if not self.error <= self.bound:
            return f"{self.where}: error {self.error:.3g} exceeds {self.bound:.3g} for {self.dtype}"
        return None


def as_document(verdict: Verdict) -> dict[str, Any]:
    """A verdict, JSON-ready. An error that is not finite is null."""
    return {
        "passed": verdict.passed,
        "reason": verdict.reason,
        "error": verdict.error if isfinite(verdict.error) else None,
        "bound": verdict.bound,
        "where": verdict.where,
        "positions": list(verdict.positions),
        "dtype": verdict.dtype,
    }


def judge(*, error: float, where: str, positions: Sequence[int], dtype: str, bound: float | None = None) -> Verdict:
    """The verdict on the worst error over `positions`, by BOUND of `dtype` unless `bound` is given. NaN never passes.

    Raises UnknownNameError for a dtype without a bound.
    """
    if dtype not in BOUND:
        raise UnknownNameError(f"dtype {dtype!r}: no bound; there is one for {', '.join(BOUND)}")
    allowed = BOUND[dtype] if bound is None else bound
    passed = error <= allowed and any(position > 0 for position in positions)
    return Verdict(passed, error, allowed, where, tuple(positions), dtype)
