"""Measures the link between two GPUs: the time of data on its way to a GPU that polls it, and the rate of copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from ctypes import c_int
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from flywheel.errors import NoGpuError
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu import driver
from flywheel.vm.gpu.devices import count_gpus
from flywheel.vm.gpu.driver import Gpu, check_alike
from flywheel.vm.gpu.nvrtc import CompiledUnit, compile_unit

_WARP: Final = 32
_SLOT_BYTES: Final = 16 * _WARP
_ROUNDS: Final = 10_000
_MOST_POLLS: Final = 1 << 22  # some seconds: a partner that never runs ends the probe
_TOLD: Final = 3
_SPARE_SMEM_BYTES: Final = 2 * 1024
_SAMPLES: Final = 7
_COPY_BYTES: Final = 256 * 1024**2
_COPIES: Final = 8
"""Copies each way in a sample: so many that the start of the second direction does not matter."""


@dataclass(frozen=True, slots=True)
class ProbedLink:
    """What was measured between a GPU and `peer`, the other's number: the fields of `measure.peer_link.PeerLink`."""

    peer: int
    one_way_us: float
    same_gpu_us: float
    to_gbs: float
    from_gbs: float


@dataclass(frozen=True, slots=True)
class _End:
    """One GPU of a pair, with its kernel and the slot in its memory that the other one writes."""

    gpu: Gpu
    kernel: Any
    slot: int


def probe_links(gpu: Gpu, watch: Callable[[str], None]) -> Iterator[ProbedLink]:
    """Measure the link between a GPU and each other of this machine. It takes some seconds a pair.

    `watch` gets a line for each GPU without a link: of another kind, or without access. Raises as `probes.probe`.
    """
    for index in range(count_gpus()):
        if index == gpu.index:
            continue
        try:
            peer = _joined(gpu, index)
            yield probe_link(gpu, peer)
        except NoGpuError as error:
            watch(str(error))


def _joined(gpu: Gpu, index: int) -> Gpu:
    """GPU `index`, which gets access to the memory of `gpu` and gives it access to its own. Raises NoGpuError."""
    try:
        peer = driver.open_gpu(index)
    finally:
        gpu.make_current()
    check_alike((gpu, peer))
    if not (gpu.reaches(peer) and peer.reaches(gpu)):
        raise NoGpuError(
            f"GPU {gpu.index} ({gpu.pci_bus_id}) and GPU {peer.index} ({peer.pci_bus_id}) have no access to each "
            "other's memory: programs of several ranks need it"
        )
    gpu.join(peer)
    peer.join(gpu)
    gpu.make_current()
    return peer


def probe_link(gpu: Gpu, peer: Gpu, rounds: int = _ROUNDS, most_polls: int = _MOST_POLLS) -> ProbedLink:
    """Measure the link between two GPUs that have access to each other's memory.

    Raises NoGpuError where one does not see what the other stores, and as `probes.probe`.
    """
    gpus = gpu, peer
    with ExitStack() as stack:
        # All that might wait for a GPU that spins is done before a kernel runs.
        units = [compile_unit("probes.cu", arch_name(each.sm_arch), {}) for each in gpus]
        ends = [_end(stack, each, unit) for each, unit in zip(gpus, units, strict=True)]
        alone = [ends[0], _End(gpu, ends[0].kernel, _alloc(stack, gpu, _SLOT_BYTES))]
        one_way, same_gpu = (_one_way_us(each, rounds, most_polls) for each in (ends, alone))
        return ProbedLink(peer.index, one_way, same_gpu, *_copy_rates(gpu, peer))


def _end(stack: ExitStack, gpu: Gpu, unit: CompiledUnit) -> _End:
    """An end whose kernel has run, so that its first launch loads nothing more."""
    kernel = gpu.load(unit)["pass_data"]
    slot = _alloc(stack, gpu, _SLOT_BYTES)
    gpu.launch(kernel, 1, _WARP, (slot, slot, c_int(0), c_int(0), c_int(0), slot, slot))
    gpu.sync()
    return _End(gpu, kernel, slot)


def _alloc(stack: ExitStack, gpu: Gpu, nbytes: int) -> int:
    return _memory(stack, gpu, nbytes).address


def _memory(stack: ExitStack, gpu: Gpu, nbytes: int) -> driver.Memory:
    memory = gpu.alloc(nbytes)
    stack.callback(gpu.free, memory)
    return memory


def _one_way_us(ends: Sequence[_End], rounds: int, most_polls: int) -> float:
    """The time of 512 bytes from one end to the other: half of the median round, after a launch that does not count.

    Raises NoGpuError where an end polls in vain.
    """
    gpu = ends[0].gpu
    with ExitStack() as stack:
        ticks, told = (_memory(stack, gpu, nbytes) for nbytes in (4 * rounds, 8 * _TOLD))
        times = []
        for _ in range(1 + _SAMPLES):
            _rally(ends, (c_int(rounds), c_int(most_polls)), (ticks.address, told.address))
            done, ns, all_ticks = (int(each) for each in gpu.download(told, np.uint64, (_TOLD,)))
            if done < rounds:
                there = " and ".join(f"GPU {each.gpu.index}" for each in ends)
                raise NoGpuError(f"{there}: no answer after {done} of {rounds} rounds of {most_polls:,} polls")
            middle = float(np.median(gpu.download(ticks, np.uint32, (rounds,))))
            times.append(middle / 2 * ns / all_ticks / 1e3)
    return median(times[1:])


def _rally(ends: Sequence[_End], counts: tuple[c_int, c_int], told: tuple[int, int]) -> None:
    """Let both ends pass data to and fro, and wait until both are done."""
    one, other = ends
    zeros = np.zeros(_SLOT_BYTES, np.uint8)
    for end in ends:
        end.gpu.upload(driver.Memory(end.slot, _SLOT_BYTES), zeros)
    if one.gpu is other.gpu:  # two blocks, each with all the shared memory of an SM, so that they run on two
        smem_bytes = one.gpu.smem_optin_bytes - _SPARE_SMEM_BYTES
        one.gpu.launch(
            one.kernel, 2, _WARP, (one.slot, other.slot, *counts, c_int(1), *told), smem_bytes=smem_bytes
        )
    else:  # nothing in between may wait for either
        one.gpu.launch(one.kernel, 1, _WARP, (one.slot, other.slot, *counts, c_int(1), *told))
        other.gpu.launch(other.kernel, 1, _WARP, (other.slot, one.slot, *counts, c_int(0), 0, 0))
    for end in ends:
        end.gpu.sync()


def _copy_rates(gpu: Gpu, peer: Gpu) -> tuple[float, float]:
    """The rates in GB/s of copies from one GPU to the other and back, both at once."""
    gpus = gpu, peer
    with ExitStack() as stack:
        nbytes = min(_COPY_BYTES, *(each.free_bytes() // 4 for each in gpus))
        sources, targets = ([_alloc(stack, each, nbytes) for each in gpus] for _ in range(2))
        rates: list[tuple[float, float]] = []
        for _ in range(1 + _SAMPLES):
            starts = [each.record() for each in gpus]
            for _ in range(_COPIES):
                gpu.copy(targets[1], sources[0], nbytes)
                peer.copy(targets[0], sources[1], nbytes)
            stops = [each.record() for each in gpus]
            for each in gpus:
                each.sync()
            there, back = (
                _COPIES * nbytes / each.elapsed_us(start, stop) / 1e3
                for each, start, stop in zip(gpus, starts, stops, strict=True)
            )
            rates.append((there, back))
    to, back = (median(column) for column in zip(*rates[1:], strict=True))
    return to, back
