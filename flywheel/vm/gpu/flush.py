"""Empties the L2 cache before a sample: fills it with clean lines that no program reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import c_longlong
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, Self

from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.nvrtc import compile_unit

FACTOR: Final = 2
"""Bytes to read, as a multiple of the cache's size. More than once, since eviction is not strictly oldest first."""

_BLOCKS_PER_SM: Final = 2
_THREADS: Final = 1024
_UNROLL: Final = 4  # of read_loads in probes.cu
_WORD_BYTES: Final = 16


class Flush:
    """Empties the L2 cache, in stream order, whenever it is called. Close it, or use `with`.

    With `peers`, it empties theirs too, and the stream goes on when all are empty.

    It reads and does not write: written lines would be flushed to memory during the next sample, and slow it down.
    Raises KernelCompileError, GpuMemoryError and GpuFaultError.
    """

    def __init__(self, gpu: Gpu, peers: Sequence[Gpu] = ()) -> None:
        self._gpu = gpu
        self._kernel = _kernel(gpu)
        self._blocks = _BLOCKS_PER_SM * gpu.num_sms
        sweep = self._blocks * _THREADS * _UNROLL * _WORD_BYTES
        self._memory = gpu.alloc(-(-FACTOR * gpu.l2_bytes // sweep) * sweep + _WORD_BYTES)
        self._others: list[Flush] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for peer in peers:
                self._others.append(Flush(peer))
            undo.pop_all()

    def __call__(self) -> None:
        """Enqueue one flush."""
        for other in self._others:
            other()
            self._gpu.follow(other._gpu)
        words = self._memory.nbytes // _WORD_BYTES - 1
        sink = self._memory.address + words * _WORD_BYTES
        self._gpu.launch(self._kernel, self._blocks, _THREADS, (self._memory.address, c_longlong(words), sink))

    def close(self) -> None:
        """Give the memory back."""
        while self._others:
            self._others.pop().close()
        self._gpu.free(self._memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@lru_cache(maxsize=8)
def _kernel(gpu: Gpu) -> Any:
    """Loaded once: a search times thousands of programs on a GPU."""
    return gpu.load(compile_unit("probes.cu", arch_name(gpu.sm_arch), {}))["read_loads"]
