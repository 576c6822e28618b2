"""KV-cache memory that grows with use: maps 2 MiB granules to each sequence's reserved addresses, on a GPU or in this
machine's own memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import CacheMemoryError, GpuMemoryError
from flywheel.process import available_bytes
from flywheel.vm.gpu.granules import Granules

GRANULE_BYTES: Final = 2**16
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
"""Flags of a mapping that the system does not share with child processes, and for which it need not reserve memory."""


class GrowingMemory:
    """Reserved addresses for `batch` sequences, and the granules (physical pages) that are mapped to them.

    A sequence has streams (the keys or the values of one head of one layer) of `context` positions, each stream's of as
    many bytes as `position_bytes` says. Its streams follow each other without a gap. Each sequence starts at a granule
    boundary, so no granule is shared by two sequences.

    The first `always` positions of a stream can always be accessed: kernels read and write them in rows without a
    sequence. Where no sequence has memory for them, all these addresses share one granule, whose contents do not
    matter.
    """

    def __init__(
        self, granules: Granules, batch: int, position_bytes: Sequence[int], context: int, always: int = 1
    ) -> None:
        self.granule_bytes: Final = granules.nbytes
        size = granules.nbytes
        self._granules, self._context = granules, context
        self._position_bytes = np.array(position_bytes, np.int64)
        ends = (self._position_bytes * context).cumsum()
        self._starts = ends - self._position_bytes * context
        self.stride: Final = -(-int(ends[-1]) // size) * size  # bytes from sequence to sequence
        self._count = batch * self.stride // size
        self.address: Final = granules.reserve(self._count)
        self._own: list[dict[int, int]] = [{} for _ in range(batch)]
        self._reach = [0] * batch
        self._idle = set(range(batch))
        self._first = frozenset(self._needed(always).tolist())
        try:
            self._shared = granules.create()
        except GpuMemoryError:
            granules.release(self.address, self._count)
            raise
        for row in range(batch):
            for index in sorted(self._first):
                granules.map(self._at(row, index), self._shared)

    @property
    def reach(self) -> list[int]:
        """Positions of each sequence that have memory."""
        return self._reach

    @property
    def held_bytes(self) -> int:
        """Bytes of mapped memory."""
        return sum(map(len, self._own)) * self.granule_bytes

    def hold(self, row: int, positions: int, *, may_take: bool = False) -> list[int]:
        """Give a sequence memory for `positions`. Returns the byte offsets from `address` at which new granules begin.

        With `may_take`, granules of ended sequences are reused; no launch may use their rows. Raises CacheMemoryError,
        and changes nothing, if there is not enough memory.
        """
        self._idle.discard(row)
        if positions <= self._reach[row]:
            return []
        own = self._own[row]
        new = [index for index in self._needed(positions).tolist() if index not in own]
        made = self._make(len(new), may_take)
        if len(made) < len(new):
            for granule in made:
                self._granules.destroy(granule)
            size = self.granule_bytes
            raise CacheMemoryError(
                f"KV caches: {positions:,} positions of a sequence take {len(new) * size:,} bytes more, "
                f"{self._room() * size:,} are free and all sequences hold {self.held_bytes:,}"
            )
        for index, granule in zip(new, made, strict=True):
            if index in self._first:
                self._granules.unmap(self._at(row, index))
            self._granules.map(self._at(row, index), granule)
            own[index] = granule
        self._reach[row] = self._reached(positions)
        return [row * self.stride + index * self.granule_bytes for index in new]

    def leave(self, row: int) -> None:
        """End a sequence. Its memory stays for the row's next sequence."""
        self._idle.add(row)

    def give_back(self) -> None:
        """Free the memory of ended sequences. The device must not be using their rows."""
        for row in sorted(self._idle):
            for granule in self._strip(row):
                self._granules.destroy(granule)

    def close(self) -> None:
        """Free all memory."""
        self._idle = set(range(len(self._own)))
        self.give_back()
        for row in range(len(self._own)):
            for index in sorted(self._first):
                self._granules.unmap(self._at(row, index))
        self._granules.destroy(self._shared)
        self._granules.release(self.address, self._count)

    def _make(self, count: int, may_take: bool) -> list[int]:
        """Create `count` granules, or as many as there is memory for."""
        found: list[int] = []
        for row in sorted(self._idle) if may_take else ():
            if self._room() >= count - len(found):
                break
            granules = self._strip(row)
            short = count - len(found)
            found += granules[:short]
            for granule in granules[short:]:
                self._granules.destroy(granule)
        for _ in range(min(count - len(found), self._room())):
            try:
                found.append(self._granules.create())
            except GpuMemoryError:  # less memory than reported free
                break
        return found

    def _room(self) -> int:
        """The number of granules that there is memory for."""
        return max(0, self._granules.free_bytes() - self._granules.spared_bytes) // self.granule_bytes

    def _strip(self, row: int) -> list[int]:
        """Unmap a row's granules and return them."""
        own, self._own[row], self._reach[row] = self._own[row], {}, 0
        for index in own:
            self._granules.unmap(self._at(row, index))
            if index in self._first:
                self._granules.map(self._at(row, index), self._shared)
        return list(own.values())

    def _needed(self, positions: int) -> npt.NDArray[np.int64]:
        """Indices of the granules that hold the first `positions` of a sequence, ascending; equal for all sequences."""
        size = self.granule_bytes
        edges = np.zeros(self.stride // size + 1, np.int64)
        np.add.at(edges, self._starts // size, 1)
        np.add.at(edges, (self._starts + positions * self._position_bytes - 1) // size + 1, -1)
        return np.flatnonzero(edges.cumsum()[:-1])

    def _reached(self, positions: int) -> int:
        """Positions of each stream that the granules of the first `positions` hold, at least."""
        size = self.granule_bytes
        ends = ((self._starts + positions * self._position_bytes - 1) // size + 1) * size
        return min(int(((ends - self._starts) // self._position_bytes).min()), self._context)

    def _at(self, row: int, index: int) -> int:
        return self.address + row * self.stride + index * self.granule_bytes


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
