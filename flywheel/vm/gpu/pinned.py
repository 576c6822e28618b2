"""Pinned memory of the host, which the GPU reads and writes by itself."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class HostWords:
    """uint32 words of pinned host memory, which the stream writes behind the host's back, until `Gpu.free_host`."""

    address: int
    array: npt.NDArray[np.uint32]


class HostWord:
    """A uint32 of pinned host memory that kernels can read while they run."""

    def __init__(self, host_address: int, address: int) -> None:
        self._word = ctypes.c_uint32.from_address(host_address)
        self.address: Final = address

    @property
    def value(self) -> int:
        """What the word holds; a write is seen by running kernels."""
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value
