"""The driver's facts about this machine's GPUs. Nothing here creates a CUDA context."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import NoGpuError
from flywheel.installing import driver_here, install_line
from flywheel.ir import GpuTarget
from flywheel.measure.device import Device, generic_name
from flywheel.measure.environment import list_gpus


def no_package(name: str) -> NoGpuError:
    """The error for a package that is not installed. Where there is no GPU either, that is the first fact."""
    line = install_line("cuda")
    if driver_here() is None and not list_gpus():
        return NoGpuError(f"no NVIDIA GPU is here: no driver is loaded; on a machine with one: {line}")
    return NoGpuError(f"{name} is not installed: {line}")


def count_gpus() -> int:
    """The number of GPUs that CUDA shows this process. Raises NoGpuError without cuda.bindings."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise no_package("cuda.bindings") from error
    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return 0
    except RuntimeError:  # no driver library
        return 0
    result, count = driver.cuDeviceGetCount()
    return int(count) if result == driver.CUresult.CUDA_SUCCESS else 0


def describe_gpu(index: int = 0) -> tuple[Device, GpuTarget]:
    """The GPU that CUDA numbers `index`, and a generic record of it from the driver's numbers.

    The record's bandwidth is twice the memory's clock times the width of its bus. Raises NoGpuError.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise no_package("cuda.bindings") from error

    def told(returned: tuple[Any, ...]) -> Any:
        if returned[0] != driver.CUresult.CUDA_SUCCESS:
            raise NoGpuError(f"GPU {index}: {returned[0].name}")
        return returned[1] if len(returned) > 1 else None

    try:
        told(driver.cuInit(0))
    except RuntimeError as error:  # no driver library
        raise NoGpuError(f"GPU {index}: {_line(error)}") from error
    device = told(driver.cuDeviceGet(index))
    kinds = driver.CUdevice_attribute
    facts = {
        field: int(told(driver.cuDeviceGetAttribute(getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device)))
        for field, name in _ATTRIBUTES.items()
    }
    name = told(driver.cuDeviceGetName(256, device)).partition(b"\0")[0].decode()
    if not facts["memory_khz"] * facts["bus_bits"]:
        raise NoGpuError(f"GPU {index}: {name} does not tell its memory's clock and bus, so it has no floor")
    total_bytes = int(told(driver.cuDeviceTotalMem(device)))
    return Device(name, facts["num_sms"], total_bytes), generic_target(name, total_bytes, facts)


def generic_target(name: str, total_bytes: int, facts: Mapping[str, int]) -> GpuTarget:
    """A generic record made of a driver's numbers. `facts` has the fields of _ATTRIBUTES: clocks in kHz, the bus in
    bits."""
    bus_bits, memory_mhz = facts["bus_bits"], facts["memory_khz"] / 1e3
    return GpuTarget(
        name=generic_name(Device(name, facts["num_sms"], total_bytes)),
        sm_arch=10 * facts["major"] + facts["minor"],
        num_sms=facts["num_sms"],
        smem_bytes_per_sm=facts["smem_bytes_per_sm"],
        smem_bytes_per_block_optin=facts["smem_bytes_per_block_optin"],
        regs_per_sm=facts["regs_per_sm"],
        max_threads_per_sm=facts["max_threads_per_sm"],
        max_regs_per_thread=255,  # holds since sm_35; no attribute has it
        l2_bytes=facts["l2_bytes"],
        hbm_bytes=total_bytes,
        hbm_bandwidth_gbs=2 * facts["memory_khz"] * 1e3 * bus_bits / 8 / 1e9,
        fp16_tflops=0.0,
        clock_ghz=facts["clock_khz"] / 1e6,
        supports_cooperative=bool(facts["cooperative"]),
        note=f"no datasheet: what the driver says of {name}, {bus_bits} bits at {memory_mhz:,.0f} MHz, twice a cycle",
    )


_ATTRIBUTES: Final = MappingProxyType(
    {
        "major": "COMPUTE_CAPABILITY_MAJOR",
        "minor": "COMPUTE_CAPABILITY_MINOR",
        "num_sms": "MULTIPROCESSOR_COUNT",
        "smem_bytes_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
        "smem_bytes_per_block_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        "regs_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
        "max_threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
        "l2_bytes": "L2_CACHE_SIZE",
        "bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
        "memory_khz": "MEMORY_CLOCK_RATE",
        "clock_khz": "CLOCK_RATE",
        "cooperative": "COOPERATIVE_LAUNCH",
    }
)
"""Field of a generic record -> the driver's attribute."""


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
