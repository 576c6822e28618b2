"""Device memory in granules: addresses are reserved first, and memory is put behind them when it is wanted.

Source: CUDA driver API, "Virtual Memory Management" (cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Protocol

from flywheel.errors import GpuMemoryError
from flywheel.vm.gpu.contexts import ContextDriver

_SPARED_BYTES: Final = 2**28
"""For torch, which draws tokens and reads prompts."""


class Granules(Protocol):
    """Memory of a device in pieces of `nbytes`, and addresses that they are mapped to."""

    @property
    def nbytes(self) -> int:
        """Of a granule."""

    @property
    def spared_bytes(self) -> int:
        """Memory to leave to others."""

    def reserve(self, count: int) -> int:
        """The first of addresses for `count` granules; none is there yet, and touching one is a fault."""

    def release(self, address: int, count: int) -> None:
        """Give addresses back, behind which there is nothing."""

    def create(self) -> int:
        """A new granule, of any content. Raises GpuMemoryError."""

    def destroy(self, granule: int) -> None:
        """Give a granule back that is mapped nowhere."""

    def map(self, address: int, granule: int) -> None:
        """Put a granule behind an address that has none. One granule may be behind several."""

    def unmap(self, address: int) -> None:
        """Take the granule from an address. The device touches that address no more."""

    def free_bytes(self) -> int:
        """Memory that nobody holds now."""


class DriverGranules:
    """Granules of one GPU. Methods raise as `checked`, which gives the value behind the status of a driver call."""

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
        """As Granules says."""
        return int(self._checked("reserve", self._cuda.cuMemAddressReserve(count * self.nbytes, 0, 0, 0)))

    def release(self, address: int, count: int) -> None:
        """As Granules says."""
        self._checked("release", self._cuda.cuMemAddressFree(address, count * self.nbytes))

    def create(self) -> int:
        """As Granules says."""
        result, granule = self._cuda.cuMemCreate(self.nbytes, self._kind, 0)
        if result == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise GpuMemoryError(f"GPU memory: {self.nbytes:,} bytes requested, {self.free_bytes():,} are free")
        return int(self._checked("create", (result, granule)))

    def destroy(self, granule: int) -> None:
        """As Granules says."""
        self._checked("destroy", self._cuda.cuMemRelease(granule))

    def map(self, address: int, granule: int) -> None:
        """As Granules says."""
        self._checked("map", self._cuda.cuMemMap(address, self.nbytes, 0, granule, 0))
        self._checked("set access", self._cuda.cuMemSetAccess(address, self.nbytes, [self._access], 1))

    def unmap(self, address: int) -> None:
        """As Granules says."""
        self._checked("unmap", self._cuda.cuMemUnmap(address, self.nbytes))
