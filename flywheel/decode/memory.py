"""Converts torch's out-of-memory error into GpuMemoryError."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from flywheel.errors import GpuMemoryError

_T = TypeVar("_T")


def within_memory(what: str, work: Callable[[], _T]) -> _T:
    """The result of `work`. If torch runs out of memory, frees what `work` allocated and raises GpuMemoryError."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        why = str(error).partition("\n")[0]
    raise GpuMemoryError(f"{what}: {why}")
