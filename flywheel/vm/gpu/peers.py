"""Several GPUs of this machine whose kernels may access each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from flywheel.errors import NoGpuError
from flywheel.vm.gpu import driver
from flywheel.vm.gpu.devices import count_gpus
from flywheel.vm.gpu.driver import Gpu


def open_gpus(count: int) -> tuple[Gpu, ...]:
    """The GPUs that CUDA numbers from 0 to `count` - 1. The first one becomes current in this thread.

    Raises NoGpuError where there are fewer, where they are of different kinds, and where one cannot access another's
    memory; the message names the pair.
    """
    if count == 1:
        return (driver.open_gpu(),)
    there = count_gpus()
    if there < count:
        raise NoGpuError(f"{count} ranks need {count} GPUs: {there or 'none'} {'is' if there == 1 else 'are'} here")
    gpus = tuple([driver.open_gpu(index) for index in range(count)])
    check_alike(gpus)
    for one, other in permutations(gpus, 2):
        if not one.reaches(other):
            raise NoGpuError(
                f"GPU {one.index} ({one.pci_bus_id}) has no access to the memory of GPU {other.index} "
                f"({other.pci_bus_id}): {count} ranks need links or PCIe peer access between all pairs"
            )
    for one, other in permutations(gpus, 2):
        one.join(other)
    gpus[0].make_current()
    return gpus


def check_alike(gpus: Sequence[Gpu]) -> None:
    """Raise NoGpuError where a GPU is of another kind than the first: each rank's part is made for the same kind."""
    kinds = [(gpu.name, gpu.num_sms, gpu.smem_optin_bytes) for gpu in gpus]
    for gpu, kind in zip(gpus, kinds, strict=True):
        if kind != kinds[0]:
            first, other = (f"{name} with {sms} SMs" for name, sms, _ in (kinds[0], kind))
            raise NoGpuError(f"GPU {gpu.index} is {other}, GPU {gpus[0].index} {first}: ranks need GPUs of one kind")
