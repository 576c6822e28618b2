"""Functions that numba compiles. Importing this takes 0.3 s, so only what is about to compute does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Machine code of a function, made at its first call and kept for other processes where numba finds a place."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # neither the function's folder nor the user's cache can be written to
        return cast(Function, numba.njit(function))
