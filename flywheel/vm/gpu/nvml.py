"""The state of a GPU and who is on it, from NVML, and waiting until GPUs are quiet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event
from time import monotonic
from types import MappingProxyType
from typing import Any, Final, TypeVar

from flywheel.measure.latency import GpuState
from flywheel.measure.tenants import Attendant, GpuPresence, Tenant, together
from flywheel.vm.watching import tell

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

_WINDOW_US: Final = 1_000_000
"""Microseconds of the past in which a process may have computed."""

_MOST_GENERATIONS: Final = 64


def read_state(pci_bus_id: str) -> GpuState:
    """The state of the GPU at a PCI address. This process must be computing on it.

    Fields that NVML does not report are None; without NVML, all are. `strangers` is that of `read_presence`.
    """
    nvml, handle = _device(pci_bus_id)
    if handle is None:
        return GpuState()
    power_mw = _told(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return GpuState(
        sm_clock_mhz=_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        mem_clock_mhz=_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        power_w=None if power_mw is None else power_mw / 1000,
        temperature_c=_told(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        throttle=_throttle(nvml, handle),
        strangers=_others(nvml, handle).strangers,
    )


def read_presence(gpu: str, at_work: bool = True) -> GpuPresence:
    """Who is on a GPU, which is a PCI address or a UUID, and what it does. Without NVML nothing is known.

    This process and its descendants are no others; `at_work` says whether any of them is on the GPU. Processes that
    only draw, such as a desktop's, do not count.
    """
    nvml, handle = _device(gpu)
    if handle is None:
        return GpuPresence()
    memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = _told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return replace(
        _others(nvml, handle, at_work),
        utilisation_percent=None if rates is None else int(rates.gpu),
        free_bytes=None if memory is None else int(memory.free),
        total_bytes=None if memory is None else int(memory.total),
        sm_clock_mhz=_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        mem_clock_mhz=_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        throttle=_throttle(nvml, handle),
    )


def throttle_names(bits: int) -> str:
    """Names of the reasons in a bit mask, separated by commas; "none" where no reason holds clocks down."""
    return ",".join(name for bit, name in THROTTLE_REASONS.items() if bits & bit) or "none"


def _others(nvml: Any, handle: Any, at_work: bool = True) -> GpuPresence:
    """The processes beside this one's family, and how many of them compute.

    If NVML lists none of this family, one of those that it lists is of this family if it is `at_work`, so one counts as
    no stranger.
    """
    listed = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if listed is None or (at_work and not listed):
        return GpuPresence()
    held = {int(each.pid): each.usedGpuMemory for each in listed}
    family = [pid for pid in held if _is_ours(pid)]
    theirs = [pid for pid in held if pid not in family]
    ours = 0 if family or not at_work else 1
    busy = _busy(nvml, handle) if len(theirs) > ours else None
    if busy is not None and not busy.keys() <= held.keys():  # numbered by another container, or just ended
        busy = None
    others = tuple(
        Tenant(pid, _name(pid), held[pid], None if busy is None else busy.get(pid, 0)) for pid in theirs
    )
    computing = [each for each in others if each.busy_percent != 0]
    return GpuPresence(others, max(0, len(computing) - ours), mixed=ours > 0)


def _busy(nvml: Any, handle: Any) -> Mapping[int, int] | None:
    """Process -> the largest share, in percent, of the last second's samples in which its kernels ran; None where the
    driver does not say."""
    now_us = time.time_ns() // 1000
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, now_us - _WINDOW_US)
    except nvml.NVMLError as error:
        # A list of no samples is an error, too.
        return {} if getattr(error, "value", None) in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS) else None
    found: dict[int, int] = {}
    for each in samples:
        if each.timeStamp > now_us - _WINDOW_US and 0 < each.smUtil <= 100:
            found[int(each.pid)] = max(int(each.smUtil), found.get(int(each.pid), 0))
    return found


def _is_ours(pid: int) -> bool:
    """Whether a process is this one or descends from it."""
    for _ in range(_MOST_GENERATIONS):
        if pid == os.getpid():
            return True
        if pid <= 1:
            return False
        pid = _parent(pid)
    return False


def _parent(pid: int) -> int:
    """The process that started another; 0 if that is not known."""
    with suppress(OSError, ValueError, IndexError):  # it has ended, or is another container's
        # The name, in parentheses, may hold any character.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _name(pid: int) -> str | None:
    with suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        return "".join(letter if letter.isprintable() else "?" for letter in name) or None
    return None


def _throttle(nvml: Any, handle: Any) -> str | None:
    bits = _told(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return None if bits is None else throttle_names(bits)


def _device(gpu: str) -> tuple[Any, Any]:
    """(the module, the handle of a GPU); the handle is None where NVML or the GPU is missing."""
    nvml = _nvml()
    if nvml is None:
        return None, None
    find = nvml.nvmlDeviceGetHandleByPciBusId if ":" in gpu else nvml.nvmlDeviceGetHandleByUUID
    return nvml, _told(nvml, find, gpu)


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


def attendant_of(gpus: Sequence[str], pause: Callable[[float], bool] | None = None) -> Attendant:
    """What waits until the GPUs, by PCI address or UUID, are quiet, and says so on stderr. This process or a descendant
    must be on them.

    `pause` is as `Attendant` takes it; without it, this thread sleeps.
    """

    def read() -> GpuPresence:
        return together([read_presence(gpu) for gpu in gpus] or [GpuPresence()])

    return Attendant(read, tell, pause or Event().wait, monotonic)
