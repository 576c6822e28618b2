"""Answers about the latest program, which lowering, proof, id and prediction share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from flywheel.ir.program import MegakernelProgram

Found = TypeVar("Found")


def once(function: Callable[[MegakernelProgram], Found]) -> Callable[[MegakernelProgram], Found]:
    """`function`, with its latest answer kept. It answers again with that when it gets the same object. Errors are not
    kept."""
    latest: tuple[MegakernelProgram, Found] | None = None

    @wraps(function)
    def found(program: MegakernelProgram) -> Found:
        nonlocal latest
        known = latest  # another thread may replace it
        if known is None or known[0] is not program:
            known = latest = program, function(program)
        return known[1]

    return found
