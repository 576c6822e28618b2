"""Turns torch's errors for want of GPU memory into GpuMemoryError: one line with what is free and who holds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import torch

from flywheel.errors import GpuMemoryError
from flywheel.vm.gpu.driver import open_gpu

_T = TypeVar("_T")

_ASKED: Final = re.compile(r".*?Tried to allocate [\d.]+ \w+")
"""The part of torch's message that says what it asked for; advice follows."""

_SIGNS: Final = ("CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED",
                 "CUDNN_STATUS_ALLOC_FAILED")  # fmt: skip
"""What torch's other errors say where a library of CUDA finds no memory."""


def within_memory(what: str, work: Callable[[], _T]) -> _T:
    """The result of `work`. If torch runs out of memory, frees what `work` allocated and raises GpuMemoryError."""
    try:
        return work()
    except RuntimeError as error:
        if not is_exhausted(error):
            raise
        why = asked(error)
    raise GpuMemoryError(f"{what}: {why}{_room()}")


@contextmanager
def memory_named(what: str) -> Iterator[None]:
    """Within the block, turn torch's errors for want of memory into GpuMemoryError, which begins with `what`."""
    try:
        yield
    except RuntimeError as error:
        if not is_exhausted(error):
            raise
        raise GpuMemoryError(f"{what}: {asked(error)}{_room()}") from error


def is_exhausted(error: RuntimeError) -> bool:
    """Whether an error of torch says that GPU memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


def asked(error: RuntimeError) -> str:
    """What torch asked for, as far as it says, on one short line."""
    line = str(error).strip().partition("\n")[0]
    found = _ASKED.match(line)
    return line if found is None else found[0]


def _room() -> str:
    """What is free on torch's GPU, and who holds the rest; empty without a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    torch.cuda.empty_cache()  # what it kept to itself is free
    return f"; {open_gpu(torch.cuda.current_device()).room()}"
