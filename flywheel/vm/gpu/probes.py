"""Measures what a GPU can do: the rate at which plain kernels read its memory, and the time of a hand-off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import c_int, c_longlong
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.nvrtc import compile_unit

_READ_BYTES: Final = 4 * 1024**3
"""Bytes to read in a launch: about a millisecond of the fastest memory, and more than any L2 cache holds."""

_RING_BYTES: Final = 192 * 1024
_RING_CHUNKS: Final = (16 * 1024, 32 * 1024)
_MAX_SLOTS: Final = 16  # PROBE_SLOTS of probes.cu
_SPARE_SMEM_BYTES: Final = 2 * 1024
_LOAD_THREADS: Final = 1024
_LOAD_UNROLL: Final = 4  # of read_loads in probes.cu
_UINT4_BYTES: Final = 16
_COUNTER_BYTES: Final = 2 * 128
_ROUNDS: Final = 10_000
_SAMPLES: Final = 7


@dataclass(frozen=True, slots=True)
class Probed:
    """The rate of the fastest kernel that reads, its name, and the one-way time of a counter between two SMs."""

    read_gbs: float
    read_kernel: str
    hand_off_us: float


def probe(gpu: Gpu) -> Probed:
    """Measure a GPU. It takes some seconds and up to 4 GiB of the GPU's memory.

    Raises KernelCompileError, GpuMemoryError, GpuFaultError, and ConfigError where no kernel fits the architecture.
    """
    kernels = gpu.load(compile_unit("probes.cu", arch_name(gpu.sm_arch), {}))
    rates = {name: nbytes / us / 1e3 for name, nbytes, us in _read_times(gpu, kernels)}
    fastest = max(rates, key=rates.__getitem__)
    return Probed(rates[fastest], fastest, _hand_off_us(gpu, kernels["hand_off"]))


def _read_times(gpu: Gpu, kernels: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """(kernel and its shape, bytes read, us) of each kernel that reads."""
    with ExitStack() as held:
        data = gpu.alloc(min(_READ_BYTES, gpu.free_bytes() // 2))
        held.callback(gpu.free, data)
        sink = gpu.alloc(4)
        held.callback(gpu.free, sink)
        gpu.fill(data, 1)
        blocks = 2 * gpu.num_sms
        stride = blocks * _LOAD_THREADS * _LOAD_UNROLL
        count = data.nbytes // _UINT4_BYTES // stride * stride
        loads = (data.address, c_longlong(count), sink.address)
        yield (
            f"16-byte loads, 2 x {_LOAD_THREADS} threads an SM",
            count * _UINT4_BYTES,
            _time_us(gpu, lambda: gpu.launch(kernels["read_loads"], blocks, _LOAD_THREADS, loads)),
        )
        for chunk_bytes in _RING_CHUNKS:
            slots = min(_MAX_SLOTS, min(_RING_BYTES, gpu.smem_optin_bytes - _SPARE_SMEM_BYTES) // chunk_bytes)
            chunks = data.nbytes // chunk_bytes
            ring = (data.address, c_int(chunks), c_int(chunk_bytes), c_int(slots))
            yield (
                f"ring of {slots} x {chunk_bytes // 1024} KiB an SM",
                chunks * chunk_bytes,
                _time_us(gpu, _ring_launch(gpu, kernels["read_ring"], ring, slots * chunk_bytes)),
            )


def _ring_launch(gpu: Gpu, kernel: Any, args: tuple[Any, ...], smem_bytes: int) -> Callable[[], None]:
    return lambda: gpu.launch(kernel, gpu.num_sms, 32, args, smem_bytes=smem_bytes)


def _hand_off_us(gpu: Gpu, kernel: Any) -> float:
    """The one-way time in us of a counter between two SMs.

    Each of the two blocks takes all the shared memory of an SM, so they run on different SMs.
    """
    counters = gpu.alloc(_COUNTER_BYTES)
    smem_bytes = gpu.smem_optin_bytes - _SPARE_SMEM_BYTES

    def rally() -> None:
        gpu.launch(kernel, 2, 1, (counters.address, c_int(_ROUNDS)), smem_bytes=smem_bytes)

    try:
        return _time_us(gpu, rally, before=lambda: gpu.fill(counters, 0)) / (2 * _ROUNDS)
    finally:
        gpu.free(counters)


def _time_us(gpu: Gpu, run: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """The median time in us of some launches, after one that does not count."""
    times = []
    for _ in range(1 + _SAMPLES):
        before()
        start = gpu.record()
        run()
        end = gpu.record()
        gpu.sync()
        times.append(gpu.elapsed_us(start, end))
    return median(times[1:])
