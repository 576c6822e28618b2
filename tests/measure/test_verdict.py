from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from flywheel.errors import UnknownNameError
from flywheel.measure.verdict import TOLERANCE, Verdict, judge


def verdict(**changes: Any) -> Verdict:
    numbers: dict[str, Any] = {
        "max_abs_error": 0.01,
        "max_rel_error": 0.001,
        "top1_agreement": 1.0,
        "positions": (0, 7, 511),
        "dtype": "BF16",
    }
    return judge(**{**numbers, **changes})


def test_small_errors_over_several_positions_pass() -> None:
    assert verdict().passed is True
    assert verdict().reason is None


@pytest.mark.parametrize("positions", [(), (0,), (0, 0)])
def test_position_zero_alone_is_never_a_pass(positions: tuple[int, ...]) -> None:
    judged = verdict(max_abs_error=0.0, max_rel_error=0.0, positions=positions)
    assert judged.passed is False
    assert judged.reason is not None and "none after 0" in judged.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"max_abs_error": nan},
        {"max_abs_error": inf},
        {"max_rel_error": nan},
        {"max_rel_error": 0.05},
        {"top1_agreement": nan},
        {"top1_agreement": 0.5},
        {"dtype": "F32"},
    ],
)
def test_errors_beyond_the_tolerance_and_nan_fail_with_a_reason(changes: dict[str, Any]) -> None:
    assert verdict(**changes).passed is False
    assert verdict(**changes).reason is not None


def test_a_pass_cannot_be_claimed_against_the_numbers() -> None:
    with pytest.raises(ValueError, match="verdict cannot pass"):
        replace(verdict(), positions=(0,))
    with pytest.raises(ValueError, match="verdict cannot pass"):
        Verdict(True, 1.0, 1.0, 1.0, TOLERANCE["BF16"], (5,), "BF16")


def test_a_dtype_without_a_tolerance_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'I4'"):
        verdict(dtype="I4")


def test_a_verdict_names_its_worst_error_its_bound_and_where_that_was() -> None:
    judged = verdict(max_rel_error=0.02)
    assert (judged.error, judged.bound, judged.where) == (0.02, TOLERANCE["BF16"].max_rel_error, "logits")
