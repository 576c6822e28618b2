"""How much is tested: all of it in .ci/run, by default a part of each law's examples and no test that is LONG."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Final, TypeVar

import pytest

FULL: Final = os.environ.get("TEST_EFFORT") == "full"

LONG: Final = pytest.mark.long if FULL else pytest.mark.slow
"""Marks what takes long: real clusters, servers that freeze, browsers, storms, cases beyond the first. It runs in
.ci/run and with `-m slow`; what it tests has a shorter test besides, which always runs."""

_A = TypeVar("_A")
_B = TypeVar("_B")


def examples(full: int, quick: int | None = None) -> int:
    """`full`, or without TEST_EFFORT=full `quick`: a third unless it is given."""
    return full if FULL else -(-full // 3) if quick is None else quick


def sample(cases: Iterable[_A], every: int = 3) -> list[_A]:
    """All cases, or without TEST_EFFORT=full the first and each `every`-th after it."""
    return list(cases)[:: 1 if FULL else every]


def pairs(first: Iterable[_A], second: Iterable[_B]) -> list[tuple[_A, _B]]:
    """Every pair, or without TEST_EFFORT=full just so many that each value of either is in one."""
    left, right = list(first), list(second)
    if FULL:
        return list(product(left, right))
    return [(left[n % len(left)], right[n % len(right)]) for n in range(max(len(left), len(right)))]
