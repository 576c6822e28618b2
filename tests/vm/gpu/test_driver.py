from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from flywheel.errors import ConfigError, GpuFaultError, GpuMemoryError, NoGpuError, TensorError
from flywheel.installing import install_line
from flywheel.ir import TARGETS, DType
from flywheel.measure.device import Device
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu.devices import _ATTRIBUTES, describe_gpu
from flywheel.vm.gpu.driver import Gpu, _poll, check_fit, load_variant, open_gpu
from flywheel.vm.gpu.nvrtc import EntryUsage, compile_variant

H200 = TARGETS["h200"]
OPENING = """
from flywheel.errors import NoGpuError
from flywheel.vm.gpu.driver import open_gpu
try:
    open_gpu(%d)
except NoGpuError as error:
    print(error)
"""


def kernel(static_shared_bytes: int = 0) -> Any:
    variant = SimpleNamespace(threads=320, usage=EntryUsage(168, static_shared_bytes, 0, 0))
    return SimpleNamespace(variant=variant, megakernel=None)


@pytest.mark.parametrize(("index", "visible"), [(0, ""), (99, "0")])
def test_a_gpu_that_is_not_here_is_one_line(index: int, visible: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENING % index], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"GPU {index}: ") and len(line) > 8


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (None, "no NVIDIA GPU is here: no driver is loaded; on a machine with one"),
        ("580.65", "cuda.core is not installed"),
    ],
)
def test_without_the_package_the_first_fact_is_whether_a_gpu_is_here(driver: str | None, says: str) -> None:
    here = f"""import sys; sys.modules['cuda'] = None
from flywheel import installing
installing.driver_here = lambda: {driver!r}
from flywheel.vm.gpu import devices
devices.list_gpus = list
"""
    done = subprocess.run(
        [sys.executable, "-c", here + OPENING % 0], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == f"{says}: {install_line('cuda')}\n"


def test_a_launch_that_fits_passes_the_gate(host_gpu: Any) -> None:
    check_fit(kernel(), host_gpu, H200, host_gpu.smem_optin_bytes)


@pytest.mark.parametrize(
    ("target", "smem_bytes", "message"),
    [
        (TARGETS["a100"], 1024, "target a100 has sm_arch 80, NVIDIA H200 has 90"),
        (H200, 232449, "shared memory: 232449 bytes and 0 static ones exceed the 232448"),
        (
            replace(H200, num_sms=133), 200000,
            "grid of 133 blocks: NVIDIA H200 runs 132 at once, of 320 threads with 168 registers and 200000 bytes",
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_at_once_is_refused_with_the_numbers(
    host_gpu: Any, target: Any, smem_bytes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_fit(kernel(), host_gpu, target, smem_bytes)


def test_static_shared_memory_counts(host_gpu: Any) -> None:
    with pytest.raises(ConfigError, match="232400 bytes and 128 static ones exceed"):
        check_fit(kernel(128), host_gpu, H200, 232400)


class Clock:
    """Stands for the module `time`: each look at it takes 1 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1e-3
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_polling_ends_at_its_limit_and_looks_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    assert _poll(lambda: next(answers), -1.0)
    clock = Clock()
    monkeypatch.setattr("flywheel.vm.gpu.driver.time", clock)
    assert not _poll(lambda: False, 0.05)
    assert 0.05 < clock.now_s < 0.06


@pytest.mark.gpu
def test_the_gpu_describes_itself(gpu: Gpu) -> None:
    assert gpu.name.startswith("NVIDIA")
    assert arch_name(gpu.sm_arch)
    assert gpu.num_sms > 0 and gpu.smem_optin_bytes >= 48 * 1024 and gpu.l2_bytes > 0
    assert 0 < gpu.free_bytes() <= gpu.total_bytes
    assert gpu.pci_bus_id.count(":") == 2
    assert int(gpu.cuda_version.partition(".")[0]) >= 12


@pytest.mark.gpu
def test_memory_keeps_what_is_written(gpu: Gpu) -> None:
    array = np.arange(1000, dtype=np.int32)
    first, second = gpu.alloc(4096), gpu.alloc(4096)
    gpu.fill(first, 0xAB)
    before = gpu.uploaded_bytes
    gpu.upload(first, array[::2], offset=64)
    assert gpu.uploaded_bytes - before == 2000
    gpu.copy(second.address, first.address, 4096)
    assert np.array_equal(gpu.download(second, np.int32, (500,), 64), array[::2])
    assert (gpu.download(second, np.uint8, (64,)) == 0xAB).all()
    gpu.upload(first, np.zeros(0))
    for offset in (-1, 4095):
        with pytest.raises(TensorError, match=f"upload: 2 bytes at {offset} exceed 4096"):
            gpu.upload(first, np.zeros(1, np.int16), offset)
    gpu.free(first)
    gpu.free(second)


@pytest.mark.gpu
def test_memory_that_is_not_there_is_refused_with_the_numbers(gpu: Gpu) -> None:
    with pytest.raises(GpuMemoryError, match=r"GPU memory: [\d,]+ bytes requested, [\d,]+ of [\d,]+ are free"):
        gpu.alloc(2 * gpu.total_bytes)
    gpu.free(gpu.alloc(1 << 20))


@pytest.mark.gpu
def test_events_time_the_gpu_s_work_and_waiting_ends_at_its_limit(gpu: Gpu) -> None:
    memory = gpu.alloc(1 << 30)
    start = gpu.record()
    for byte in range(20):
        gpu.fill(memory, byte)
    end = gpu.record()
    assert not gpu.wait(end, 0.0)
    assert gpu.wait(end, 10.0)
    assert 100 < gpu.elapsed_us(start, end) < 1e6
    gpu.free(memory)


@pytest.mark.gpu
def test_the_kernel_fits_its_own_gpu_and_no_larger_one(gpu: Gpu) -> None:
    loaded = load_variant(gpu, compile_variant(arch_name(gpu.sm_arch), 320, DType.BF16))
    target = replace(H200, sm_arch=gpu.sm_arch, num_sms=gpu.num_sms)
    check_fit(loaded, gpu, target, gpu.smem_optin_bytes)
    with pytest.raises(ConfigError, match=rf"grid of {gpu.num_sms + 1} blocks: .+ runs {gpu.num_sms} at once"):
        check_fit(loaded, gpu, replace(target, num_sms=gpu.num_sms + 1), gpu.smem_optin_bytes)


@pytest.mark.gpu
def test_a_kernel_for_another_architecture_is_refused_before_it_is_loaded(gpu: Gpu) -> None:
    other = "sm_80" if gpu.sm_arch != 80 else "sm_90a"
    with pytest.raises(ConfigError, match=f"kernel for {other}: .+ needs {arch_name(gpu.sm_arch)}"):
        load_variant(gpu, compile_variant(other, 320, DType.BF16))


class Driver:
    """cuda.bindings.driver of a machine with one T4, as far as a description asks."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in _ATTRIBUTES.values()})
    numbers: ClassVar[dict[str, int]] = {
        "COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 5, "MULTIPROCESSOR_COUNT": 40,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 65536, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 65536,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536, "MAX_THREADS_PER_MULTIPROCESSOR": 1024, "L2_CACHE_SIZE": 4 << 20,
        "GLOBAL_MEMORY_BUS_WIDTH": 256, "MEMORY_CLOCK_RATE": 5_001_000, "CLOCK_RATE": 1_590_000,
        "COOPERATIVE_LAUNCH": 1,
    }  # fmt: skip

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return (0, index) if index == 0 else (SimpleNamespace(name="CUDA_ERROR_INVALID_DEVICE"), None)

    def cuDeviceGetAttribute(self, kind: str, device: int) -> tuple[int, int]:
        return 0, self.numbers[kind]

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"Tesla T4" + bytes(length - 8)

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:
        return 0, 15360 << 20


def test_a_gpu_is_described_by_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.bindings.driver", Driver())
    device, generic = describe_gpu()
    assert device == Device("Tesla T4", 40, 15360 << 20)
    assert (generic.name, generic.sm_arch) == ("generic-tesla-t4-40sm-15gib", 75)
    assert generic.hbm_bandwidth_gbs == pytest.approx(320.064)
    with pytest.raises(NoGpuError, match=r"^GPU 1: CUDA_ERROR_INVALID_DEVICE$"):
        describe_gpu(1)
    monkeypatch.setitem(Driver.numbers, "MEMORY_CLOCK_RATE", 0)
    with pytest.raises(NoGpuError, match=r"^GPU 0: Tesla T4 does not tell its memory's clock and bus"):
        describe_gpu()


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (GpuFaultError("GPU: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"), GpuMemoryError,
         "GPU 7: GPU: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY: no memory is free for a context"),
        (GpuFaultError("GPU: cuDeviceGet: CUDA_ERROR_UNKNOWN"), GpuFaultError, "GPU: cuDeviceGet: CUDA_ERROR_UNKNOWN"),
        (ValueError("index 7"), NoGpuError, "GPU 7: no such NVIDIA GPU is here: index 7"),
    ],
)  # fmt: skip
def test_a_gpu_without_memory_for_a_context_is_here_and_full(
    error: Exception, kind: type[Exception], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core", reason="opening a GPU needs the extra cuda")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("flywheel.vm.gpu.driver.Gpu", fail)
    with pytest.raises(kind) as caught:
        open_gpu(7)
    assert (type(caught.value), str(caught.value)) == (kind, line)
