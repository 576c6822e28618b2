"""Granules of this process's memory, behind addresses that fault until there is one. Needs Linux."""

from __future__ import annotations

import ctypes
import os
from itertools import count
from typing import Final

from flywheel.errors import GpuMemoryError

PROT_NONE, PROT_READWRITE = 0, 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mapped(address: int, size: int, protection: int, flags: int, file: int, offset: int) -> int:
    found = _libc.mmap(address, size, protection, flags, file, offset)
    assert found != FAILED, os.strerror(ctypes.get_errno())
    return int(found)


class EmulatedGranules:
    """A granule is a piece of a file in memory, and may lie at several addresses. Each call is checked as a driver
    checks it; `limit` is how many there may be at once."""

    def __init__(self, limit: int = 10**6, nbytes: int = 4096) -> None:
        self.limit, self.nbytes, self.spared_bytes = limit, nbytes, 0
        self.file = os.memfd_create("granules")
        self.numbers = count(1)
        self.made: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}

    def reserve(self, count: int) -> int:
        address = _mapped(0, count * self.nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        self.reserved[address] = count
        return address

    def release(self, address: int, count: int) -> None:
        assert self.reserved.pop(address) == count
        assert not any(address <= each < address + count * self.nbytes for each in self.mapped)
        _libc.munmap(address, count * self.nbytes)

    def create(self) -> int:
        if len(self.made) == self.limit:
            raise GpuMemoryError(f"{self.nbytes} bytes requested, 0 are free")
        granule = next(self.numbers)
        os.ftruncate(self.file, (granule + 1) * self.nbytes)
        self.made.add(granule)
        return granule

    def destroy(self, granule: int) -> None:
        assert granule not in self.mapped.values()
        self.made.remove(granule)

    def map(self, address: int, granule: int) -> None:
        assert granule in self.made and address not in self.mapped
        start, size = next(
            (start, count * self.nbytes)
            for start, count in self.reserved.items()
            if start <= address < start + count * self.nbytes
        )
        assert (address - start) % self.nbytes == 0 and address + self.nbytes <= start + size
        _mapped(address, self.nbytes, PROT_READWRITE, MAP_SHARED | MAP_FIXED, self.file, granule * self.nbytes)
        self.mapped[address] = granule

    def unmap(self, address: int) -> None:
        del self.mapped[address]
        flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE
        _mapped(address, self.nbytes, PROT_NONE, flags, -1, 0)

    def free_bytes(self) -> int:
        return (self.limit - len(self.made)) * self.nbytes
