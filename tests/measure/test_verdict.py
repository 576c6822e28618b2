from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from flywheel.errors import UnknownNameError
from flywheel.measure.verdict import BOUND, Verdict, as_document, judge


def verdict(**changes: Any) -> Verdict:
    numbers: dict[str, Any] = {
        "error": 0.001,
        "where": "position 7, row 0, L3.attn head 2",
        "positions": (0, 7, 511),
        "dtype": "BF16",
    }
    return judge(**{**numbers, **changes})


def test_small_errors_over_several_positions_pass() -> None:
    assert verdict().passed is True
    assert verdict().reason is None


@pytest.mark.parametrize("positions", [(), (0,), (0, 0)])
def test_position_zero_alone_is_never_a_pass(positions: tuple[int, ...]) -> None:
    judged = verdict(error=0.0, positions=positions)
    assert judged.passed is False
    assert judged.reason is not None and "none after 0" in judged.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"error": nan},
        {"error": inf},
        {"error": 0.05},
        {"bound": 1e-4},
        {"dtype": "F32"},
    ],
)
def test_errors_beyond_the_bound_and_nan_fail_with_a_reason(changes: dict[str, Any]) -> None:
    assert verdict(**changes).passed is False
    assert verdict(**changes).reason is not None


def test_a_pass_cannot_be_claimed_against_the_numbers() -> None:
    with pytest.raises(ValueError, match="verdict cannot pass"):
        replace(verdict(), positions=(0,))
    with pytest.raises(ValueError, match="verdict cannot pass"):
        Verdict(True, 1.0, BOUND["BF16"], "logits", (5,), "BF16")


def test_a_fail_cannot_be_claimed_against_the_numbers() -> None:
    with pytest.raises(ValueError, match="verdict must pass"):
        replace(verdict(), passed=False)


def test_a_dtype_without_a_bound_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'I4'"):
        verdict(dtype="I4")


def test_a_reason_says_where_and_by_how_much() -> None:
    assert verdict(error=0.05).reason == "position 7, row 0, L3.attn head 2: error 0.05 exceeds 0.015 for BF16"


def test_an_error_that_is_no_finite_number_is_null_in_a_document() -> None:
    assert as_document(verdict(error=inf))["error"] is None
    assert as_document(verdict())["error"] == 0.001
