"""Functions that numba compiles. Importing this takes 0.3 s, so import it only before computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The function as machine code, compiled at its first call. Other processes reuse it where numba can store it."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # neither the function's folder nor the user's cache is writable
        return cast(Function, numba.njit(function))


def bare(function: Function) -> Function:
    """As `compiled`, for a function that computes in given arrays and makes none.

    It counts no references, and is inlined where it is called, since a call would pass every field of every array.
    """
    njit = cast(Any, numba.njit)
    options: dict[str, Any] = {"_nrt": False, "forceinline": True}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # as above
        return cast(Function, njit(**options)(function))
