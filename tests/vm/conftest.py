from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flywheel.errors import GpuMemoryError, NoGpuError
from flywheel.vm.gpu.driver import Gpu, HostWord, Memory, open_gpu

Fragments = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def to_fragments(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[rows, width] in Layout.FRAGMENTS, element by element as its definition says."""
    rows, width = matrix.shape
    padded = np.zeros((-(-rows // 16) * 16, -(-width // 16) * 16), matrix.dtype)
    padded[:rows, :width] = matrix
    pieces = []
    for top in range(0, padded.shape[0], 16):
        for left in range(0, padded.shape[1], 16):
            block = padded[top : top + 16, left : left + 16]
            for lane in range(32):
                g, t = divmod(lane, 4)
                pairs = ((g, 4 * t), (g + 8, 4 * t), (g, 4 * t + 2), (g + 8, 4 * t + 2))
                pieces.extend(block[row, column : column + 2] for row, column in pairs)
    return np.concatenate(pieces)


class HostGpu:
    """What vm code asks of a Gpu, in the host's memory; kernels are Python functions that run at once.

    `waits` answers the next calls of `wait`; True afterwards.
    """

    name = "NVIDIA H200"
    pci_bus_id = "0000:00:00.0"
    sm_arch = 90
    num_sms = 132
    smem_optin_bytes = 232448
    l2_bytes = 1024
    total_bytes = 1 << 26

    def __init__(self) -> None:
        self.uploaded_bytes = 0
        self.broken = False
        self.held: dict[int, npt.NDArray[np.uint8]] = {}
        self.kernels: dict[str, Callable[..., None]] = {
            "pack_matrix": self._pack_matrix,
            "read_loads": lambda data, words, sink: self.read.append(words * 16),
        }
        self.read: list[int] = []
        self.launched: list[tuple[int, int, int, bool]] = []
        self.waits: list[bool] = []
        self.clock_us = 0.0
        self._word = ctypes.c_uint32(0)
        self.abort_flag = HostWord(ctypes.addressof(self._word), ctypes.addressof(self._word))

    def alloc(self, nbytes: int) -> Memory:
        if nbytes > self.total_bytes:
            raise GpuMemoryError(f"{nbytes} bytes")
        array = np.full(max(nbytes, 1) + 256, 0xA5, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self.held[address] = array
        return Memory(address, nbytes)

    def free(self, memory: Memory) -> None:
        del self.held[memory.address]

    def upload(self, memory: Memory, array: npt.NDArray[Any], offset: int = 0) -> None:
        assert 0 <= offset <= offset + array.nbytes <= memory.nbytes
        ctypes.memmove(memory.address + offset, np.ascontiguousarray(array).tobytes(), array.nbytes)
        self.uploaded_bytes += array.nbytes

    def download(
        self, memory: Memory, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> npt.NDArray[Any]:
        count = int(np.prod(shape))
        assert 0 <= offset <= offset + count * np.dtype(dtype).itemsize <= memory.nbytes
        return np.frombuffer(
            ctypes.string_at(memory.address + offset, count * np.dtype(dtype).itemsize), dtype
        ).reshape(shape)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def fill(self, memory: Memory, byte: int) -> None:
        ctypes.memset(memory.address, byte, memory.nbytes)

    def load(self, unit: object) -> dict[str, Callable[..., None]]:
        return self.kernels

    def launch(
        self, kernel: Callable[..., None], grid: int, block: int, args: tuple[Any, ...], *,
        smem_bytes: int = 0, cooperative: bool = False,
    ) -> None:  # fmt: skip
        self.launched.append((grid, block, smem_bytes, cooperative))
        kernel(*(getattr(arg, "value", arg) for arg in args))
        self.clock_us += 100.0

    def coresident_blocks(self, kernel: object, block: int, smem_bytes: int) -> int:
        return self.num_sms

    def record(self) -> float:
        return self.clock_us

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def wait(self, event: float, limit_s: float) -> bool:
        return self.waits.pop(0) if self.waits else True

    def sync(self) -> None:
        pass

    def _pack_matrix(self, source: int, target: int, rows: int, width: int) -> None:
        data = ctypes.string_at(source, rows * width * 2)
        packed = to_fragments(np.frombuffer(data, np.uint16).reshape(rows, width))
        ctypes.memmove(target, packed.tobytes(), packed.nbytes)


@pytest.fixture
def host_gpu() -> HostGpu:
    """A GPU in the host's memory, with two-byte elements in its packing kernel."""
    return HostGpu()


@pytest.fixture(scope="session")
def fragments() -> Fragments:
    """`to_fragments`."""
    return to_fragments


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU here; skips without one."""
    try:
        return open_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))
