"""Pinned host memory, which the GPU reads and writes directly."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class HostWords:
    """uint32 words of pinned host memory, valid until `Gpu.free_host`. The stream writes them asynchronously."""

    address: int
    array: npt.NDArray[np.uint32]


class HostWord:
    """A uint32 of pinned host memory that kernels can read while they run."""

    def __init__(self, host_address: int, address: int) -> None:
        self._word = ctypes.c_uint32.from_address(host_address)
        self.address: Final = address

    @property
    def value(self) -> int:
        """The word. Running kernels see a write."""
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value
