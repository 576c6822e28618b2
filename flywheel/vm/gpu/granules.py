"""Device memory in granules: addresses are reserved first, and memory is mapped to them when it is needed.

Source: CUDA driver API, "Virtual Memory Management" (cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Protocol

from flywheel.errors import GpuMemoryError
from flywheel.vm.gpu.contexts import ContextDriver

_SPARED_BYTES: Final = 2**28
"""Bytes that are left to torch, which draws tokens and reads prompts."""


class Granules(Protocol):
    """A device's memory in granules of `nbytes` each, and the addresses that they are mapped to."""

    @property
    def nbytes(self) -> int:
        """Bytes of a granule."""

    @property
    def spared_bytes(self) -> int:
        """Bytes of the device's memory to leave to others."""

    def reserve(self, count: int) -> int:
        """Reserve addresses for `count` granules; return the first. To touch one before `map` is a fault."""

    def release(self, address: int, count: int) -> None:
        """Give back addresses to which nothing is mapped."""

    def create(self) -> int:
        """A new granule, with arbitrary content. Raises GpuMemoryError."""

    def destroy(self, granule: int) -> None:
        """Give back a granule that is mapped nowhere."""

    def map(self, address: int, granule: int) -> None:
        """Map a granule to a reserved address that has none. One granule may be mapped to several addresses."""

    def unmap(self, address: int) -> None:
        """Unmap the granule of an address. No work on the device may touch that address any more."""

    def free_bytes(self) -> int:
        """Bytes of the device's memory that are free now."""


class DriverGranules:
    """Granules of one GPU. Methods raise as `checked`, which returns the value behind the status of a driver call."""

    def __init__(
        self, driver: ModuleType | ContextDriver, checked: Callable[[str, tuple[Any, ...]], Any], device: Any,
        free_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self._cuda, self._checked, self.free_bytes = driver, checked, free_bytes
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(device)
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.spared_bytes: Final = _SPARED_BYTES
        self.nbytes: Final = int(
            checked("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(self._kind, least))
        )

    def reserve(self, count: int) -> int:
        """See `Granules.reserve`."""
        return int(self._checked("reserve", self._cuda.cuMemAddressReserve(count * self.nbytes, 0, 0, 0)))

    def release(self, address: int, count: int) -> None:
        """See `Granules.release`."""
        self._checked("release", self._cuda.cuMemAddressFree(address, count * self.nbytes))

    def create(self) -> int:
        """See `Granules.create`."""
        result, granule = self._cuda.cuMemCreate(self.nbytes, self._kind, 0)
        if result == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise GpuMemoryError(f"GPU memory: {self.nbytes:,} bytes requested, {self.free_bytes():,} are free")
        return int(self._checked("create", (result, granule)))

    def destroy(self, granule: int) -> None:
        """See `Granules.destroy`."""
        self._checked("destroy", self._cuda.cuMemRelease(granule))

    def map(self, address: int, granule: int) -> None:
        """See `Granules.map`."""
        self._checked("map", self._cuda.cuMemMap(address, self.nbytes, 0, granule, 0))
        self._checked("set access", self._cuda.cuMemSetAccess(address, self.nbytes, [self._access], 1))

    def unmap(self, address: int) -> None:
        """See `Granules.unmap`."""
        self._checked("unmap", self._cuda.cuMemUnmap(address, self.nbytes))
