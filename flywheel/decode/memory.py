"""What torch has no memory for on a GPU, as flywheel's own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from flywheel.errors import GpuMemoryError

_T = TypeVar("_T")


def within_memory(what: str, work: Callable[[], _T]) -> _T:
    """What `work` gives. Raises GpuMemoryError where torch finds no memory for it; nothing that it made is kept."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        why = str(error).partition("\n")[0]
    raise GpuMemoryError(f"{what}: {why}")
