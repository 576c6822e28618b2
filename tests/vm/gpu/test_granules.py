"""What is asked of the driver for memory behind reserved addresses."""

from __future__ import annotations

from typing import Any

import pytest

from flywheel.errors import GpuMemoryError
from flywheel.vm.gpu.granules import DriverGranules

driver = pytest.importorskip("cuda.bindings.driver", reason="needs the extra cuda")


class Driver:
    """cuda.bindings.driver's types, and functions that write down what they are asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.full = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(driver, name)

        def call(*args: Any) -> tuple[Any, ...]:
            plain = tuple(each for each in args if isinstance(each, int))
            self.calls.append((name, *plain))
            if name == "cuMemCreate" and self.full:
                return driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
            answers = {"cuMemGetAllocationGranularity": 2**21, "cuMemAddressReserve": 2**40, "cuMemCreate": 7}
            return driver.CUresult.CUDA_SUCCESS, *([answers[name]] if name in answers else [])

        return call


def checked(what: str, returned: tuple[Any, ...]) -> Any:
    assert returned[0] == driver.CUresult.CUDA_SUCCESS, what
    return returned[1] if len(returned) > 1 else None


def test_a_granule_is_mapped_readable_and_writable_on_its_gpu_and_given_back() -> None:
    fake = Driver()
    granules = DriverGranules(fake, checked, 3, lambda: 5000)  # type: ignore[arg-type]
    assert granules._kind.location.id == granules._access.location.id == 3
    assert granules._access.flags == driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    assert granules.reserve(4) == 2**40
    granule = granules.create()
    granules.map(2**40, granule)
    granules.unmap(2**40)
    granules.destroy(granule)
    granules.release(2**40, 4)
    size = granules.nbytes
    assert [call for call in fake.calls[1:] if call[0] != "cuMemSetAccess"] == [
        ("cuMemAddressReserve", 4 * size, 0, 0, 0), ("cuMemCreate", size, 0), ("cuMemMap", 2**40, size, 0, 7, 0),
        ("cuMemUnmap", 2**40, size), ("cuMemRelease", 7), ("cuMemAddressFree", 2**40, 4 * size),
    ]  # fmt: skip
    assert ("cuMemSetAccess", 2**40, size, 1) in fake.calls
    fake.full = True
    with pytest.raises(GpuMemoryError, match=r"2,097,152 bytes requested, 5,000 are free"):
        granules.create()
