"""Functions that numba compiles. Importing this takes 0.3 s, so only what is about to compute does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Machine code of a function, made at its first call and kept for other processes where numba finds a place."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # neither the function's folder nor the user's cache can be written to
        return cast(Function, numba.njit(function))


def bare(function: Function) -> Function:
    """As `compiled`, for what computes in arrays that it is given and makes none: it counts no references, and its code
    is put where it is called, since a call would hand over every field of every array."""
    njit = cast(Any, numba.njit)
    options: dict[str, Any] = {"_nrt": False, "forceinline": True}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # as above
        return cast(Function, njit(**options)(function))
