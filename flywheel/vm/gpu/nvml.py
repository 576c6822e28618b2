"""The state of a GPU while it works, from NVML."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeVar

from flywheel.measure.latency import GpuState

_T = TypeVar("_T")

# Bits of nvml.h, "nvmlClocksEventReasons", without those that are no throttling: an idle GPU, and clocks that somebody
# set for applications or for a display.
THROTTLE_REASONS: Final = MappingProxyType(
    {
        0x004: "sw_power_cap",
        0x008: "hw_slowdown",
        0x010: "sync_boost",
        0x020: "sw_thermal",
        0x040: "hw_thermal",
        0x080: "hw_power_brake",
        0x200: "board_limit",
        0x400: "reliability",
    }
)
"""Bit of NVML -> the reason why clocks are held down."""


def read_state(pci_bus_id: str) -> GpuState:
    """The state of the GPU at a PCI address. This process must be computing on it.

    Fields that NVML does not report are None; without NVML, all are. `strangers` counts other processes that compute.
    Processes that only draw, such as a desktop's, do not count.
    """
    nvml = _nvml()
    if nvml is None:
        return GpuState()
    handle = _told(nvml, nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
    if handle is None:
        return GpuState()
    power_mw = _told(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    bits = _told(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    computing = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return GpuState(
        sm_clock_mhz=_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        mem_clock_mhz=_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        power_w=None if power_mw is None else power_mw / 1000,
        temperature_c=_told(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        throttle=None if bits is None else throttle_names(bits),
        # One of them is this process. In a container its number differs, since NVML reports the host's numbers.
        strangers=len(computing) - 1 if computing else None,
    )


def throttle_names(bits: int) -> str:
    """Names of the reasons in a bit mask, separated by commas; "none" where no reason holds clocks down."""
    return ",".join(name for bit, name in THROTTLE_REASONS.items() if bits & bit) or "none"


@cache
def _nvml() -> Any:
    """The module pynvml, initialised for the rest of the process; None where it or its library is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _told(nvml: Any, ask: Callable[..., _T], *arguments: Any) -> _T | None:
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None
