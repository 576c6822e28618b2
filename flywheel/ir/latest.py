"""What lowering, proof, id and prediction each ask of the program that they are handed, worked out once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from flywheel.ir.program import MegakernelProgram

Found = TypeVar("Found")


def once(function: Callable[[MegakernelProgram], Found]) -> Callable[[MegakernelProgram], Found]:
    """The function, which keeps its latest program and answer, and gives that answer where it is handed the same object
    again. What it raises is raised anew."""
    latest: tuple[MegakernelProgram, Found] | None = None

    @wraps(function)
    def found(program: MegakernelProgram) -> Found:
        nonlocal latest
        known = latest  # another thread may replace it meanwhile
        if known is None or known[0] is not program:
            known = latest = program, function(program)
        return known[1]

    return found
