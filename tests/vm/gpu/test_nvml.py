from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.measure.latency import GpuState
from flywheel.measure.tenants import GpuPresence, Tenant
from flywheel.vm.gpu import nvml
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.nvml import read_presence, read_state, throttle_names


class NotSupportedError(Exception):
    def __init__(self, value: int = 3) -> None:
        self.value = value


FOREIGN = 2**31 - 7
"""The number of a process that is not in this container."""


def process(pid: int, nbytes: int | None = 1000) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)


def busy(**percents: int) -> Any:
    """What NVML says of the processes pPID: a sample for each, in this moment."""
    return lambda handle, since_us: [
        SimpleNamespace(pid=int(name[1:]), smUtil=percent, timeStamp=since_us + 10)
        for name, percent in percents.items()
    ]


def library(**changes: Any) -> SimpleNamespace:
    """NVML for one GPU."""
    answers = {
        "NVMLError": NotSupportedError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_ERROR_NOT_FOUND": 6,
        "NVML_SUCCESS": 0,
        "nvmlDeviceGetHandleByPciBusId": {"0000:01:00.0": "handle"}.__getitem__,
        "nvmlDeviceGetHandleByUUID": {"GPU-1": "handle"}.__getitem__,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(free=20, total=80),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=31),
        "nvmlDeviceGetProcessUtilization": fail,
        "nvmlDeviceGetPowerUsage": lambda handle: 345678,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x4 | 0x40,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [process(os.getpid()), process(FOREIGN)],
    }
    return SimpleNamespace(**{**answers, **changes})


def fail(*arguments: object) -> Any:
    raise NotSupportedError


def test_a_gpu_s_state_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_nvml", library)
    assert read_state("0000:01:00.0") == GpuState(1980, 3201, 345.678, 41, "sw_power_cap,hw_thermal", 1)


def test_what_nvml_does_not_tell_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_nvml", lambda: library(nvmlDeviceGetPowerUsage=fail, nvmlDeviceGetClockInfo=fail))
    assert read_state("0000:01:00.0") == GpuState(None, None, None, 41, "sw_power_cap,hw_thermal", 1)


@pytest.fixture
def child() -> Iterator[int]:
    """A process that this one started."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def presence_of(
    monkeypatch: pytest.MonkeyPatch, *running: SimpleNamespace, at_work: bool = True, **changes: Any
) -> GpuPresence:
    known = library(nvmlDeviceGetComputeRunningProcesses=lambda handle: list(running), **changes)
    monkeypatch.setattr(nvml, "_nvml", lambda: known)
    return read_presence("GPU-1", at_work)


def test_others_on_a_gpu_are_named_with_what_they_hold_and_this_family_is_none_of_them(
    child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getppid()
    found = presence_of(
        monkeypatch, process(os.getpid()), process(child), process(parent, 77), process(FOREIGN, None),
        nvmlDeviceGetProcessUtilization=busy(**{f"p{parent}": 40, f"p{os.getpid()}": 60}),
    )  # fmt: skip
    (first, second) = found.others or ()
    assert (first.pid, first.nbytes, first.busy_percent) == (parent, 77, 40)
    assert first.name
    assert second == Tenant(FOREIGN, None, None, 0)
    assert (found.strangers, found.mixed) == (1, False)
    assert (found.free_bytes, found.total_bytes, found.utilisation_percent) == (20, 80, 31)


def test_a_process_that_only_holds_memory_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(handle: object, since_us: int) -> Any:
        raise NotSupportedError(6)

    mine = process(os.getpid())
    found = presence_of(monkeypatch, mine, process(FOREIGN), nvmlDeviceGetProcessUtilization=nobody)
    assert found.strangers == 0
    assert [tenant.busy_percent for tenant in found.others or ()] == [0]


def test_where_the_driver_does_not_say_who_computes_everybody_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = presence_of(monkeypatch, process(os.getpid()), process(FOREIGN))
    assert found.strangers == 1
    assert [tenant.busy_percent for tenant in found.others or ()] == [None]


def test_shares_of_processes_that_are_not_listed_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = busy(p77=40)
    found = presence_of(
        monkeypatch, process(os.getpid()), process(FOREIGN), nvmlDeviceGetProcessUtilization=numbered
    )
    assert found.strangers == 1


@pytest.mark.parametrize(("running", "strangers"), [(1, 0), (2, 1), (0, None)])
def test_in_a_container_one_of_the_hosts_processes_is_this_one(
    running: int, strangers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [process(FOREIGN - place) for place in range(running)]
    found = presence_of(monkeypatch, *listed)
    assert (found.strangers, found.mixed) == (strangers, running > 0)
    assert read_state("0000:01:00.0").strangers == strangers


def test_who_looks_without_computing_is_none_of_those_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = presence_of(monkeypatch, process(FOREIGN), at_work=False)
    assert (found.strangers, found.mixed) == (1, False)
    assert presence_of(monkeypatch, at_work=False).others == ()


@pytest.mark.parametrize("found", [None, library(nvmlDeviceGetHandleByPciBusId=fail)])
def test_without_nvml_or_the_gpu_in_it_nothing_is_told(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_nvml", lambda: found)
    assert read_state("0000:01:00.0") == GpuState()
    assert read_presence("0000:01:00.0") == GpuPresence()


@pytest.mark.parametrize(
    ("bits", "names"), [(0, "none"), (0x1 | 0x2 | 0x100, "none"), (0x88, "hw_slowdown,hw_power_brake")]
)
def test_only_what_holds_clocks_down_is_named(bits: int, names: str) -> None:
    assert throttle_names(bits) == names


@pytest.mark.gpu
def test_the_gpu_here_tells_its_clocks(gpu: Gpu) -> None:
    state = read_state(gpu.pci_bus_id)
    assert state.sm_clock_mhz is not None and 100 <= state.sm_clock_mhz <= 4000
    assert state.throttle is not None
    presence = read_presence(gpu.pci_bus_id)
    assert presence.total_bytes is not None and 0 < (presence.free_bytes or 0) < presence.total_bytes
