"""Granules in this machine's own memory, for caches of the reference VM."""

from __future__ import annotations

import ctypes
import mmap
from itertools import count
from typing import Final

from flywheel.errors import GpuMemoryError
from flywheel.process import available_bytes

GRANULE_BYTES: Final = 2**16

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
"""Flags of a mapping that the system does not share with child processes, and for which it need not reserve memory."""


class HostGranules:
    """Implements `Granules` in host memory. The system allocates memory when an address is first written; this class
    only counts it. An unmapped address can therefore be accessed without an error.

    `limit_bytes` limits all granules together; None takes the memory that the machine has free now.
    """

    def __init__(self, limit_bytes: int | None = None, nbytes: int = GRANULE_BYTES) -> None:
        self.nbytes: Final = nbytes
        self.spared_bytes: Final = 0
        left = available_bytes() if limit_bytes is None else limit_bytes
        self._limit_bytes = 2**62 if left is None else left
        self._made: set[int] = set()
        self._numbers = count(1)
        self._memory: dict[int, mmap.mmap] = {}

    def reserve(self, count: int) -> int:
        """See `Granules.reserve`."""
        memory = mmap.mmap(-1, count * self.nbytes, flags=_PRIVATE)
        address = ctypes.addressof(ctypes.c_byte.from_buffer(memory))
        self._memory[address] = memory
        return address

    def release(self, address: int, count: int) -> None:
        """See `Granules.release`. The system frees the memory once no tensor refers to it."""
        del self._memory[address]

    def create(self) -> int:
        """See `Granules.create`."""
        if self.free_bytes() < self.nbytes:
            raise GpuMemoryError(f"memory: {self.nbytes:,} bytes requested, {self.free_bytes():,} are free")
        granule = next(self._numbers)
        self._made.add(granule)
        return granule

    def destroy(self, granule: int) -> None:
        """See `Granules.destroy`."""
        self._made.remove(granule)

    def map(self, address: int, granule: int) -> None:
        """See `Granules.map`."""

    def unmap(self, address: int) -> None:
        """See `Granules.unmap`. The contents are lost."""
        for start, memory in self._memory.items():
            if start <= address < start + len(memory) and hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED, address - start, self.nbytes)

    def free_bytes(self) -> int:
        """See `Granules.free_bytes`."""
        return self._limit_bytes - len(self._made) * self.nbytes
