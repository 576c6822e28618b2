from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.measure.latency import GpuState
from flywheel.vm.gpu import nvml
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.nvml import read_state, throttle_names


class NotSupportedError(Exception):
    pass


def library(**changes: Any) -> SimpleNamespace:
    """NVML for one GPU."""
    answers = {
        "NVMLError": NotSupportedError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetHandleByPciBusId": {"0000:01:00.0": "handle"}.__getitem__,
        "nvmlDeviceGetPowerUsage": lambda handle: 345678,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x4 | 0x40,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: ["this one", "another"],
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


@pytest.mark.parametrize(("running", "strangers"), [(["one of a host's numbers"], 0), ([], None)])
def test_one_of_the_processes_on_the_gpu_is_this_one(
    running: list[str], strangers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "_nvml", lambda: library(nvmlDeviceGetComputeRunningProcesses=lambda handle: running))
    assert read_state("0000:01:00.0").strangers == strangers


@pytest.mark.parametrize("found", [None, library(nvmlDeviceGetHandleByPciBusId=fail)])
def test_without_nvml_or_the_gpu_in_it_nothing_is_told(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_nvml", lambda: found)
    assert read_state("0000:01:00.0") == GpuState()


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
