"""Emulated GPUs of which one allocation fails, and which know what is still held. Their kernels do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from emulator.gpu import EmulatedGpu
from emulator.granules import EmulatedGranules

from flywheel.errors import GpuMemoryError
from flywheel.ir import DType
from flywheel.vm.gpu.driver import HostWords, Memory
from flywheel.vm.gpu.nvrtc import CompiledUnit, CompiledVariant, EntryUsage

_ENTRIES = ("megakernel", "pack_matrix", "pack_codes", "expand_scales", "advance_rows", "read_loads", "read_ring",
            "hand_off", "pass_data")  # fmt: skip


def empty_variant(
    arch: str, threads: int, dtype: DType, cache_dir: Path | None = None, *, matrix_warps: int | None = None,
    rows: int = 0, formats: Sequence[int] = (), trace: bool = False, ranked: bool = False, **_: Any,
) -> CompiledVariant:  # fmt: skip
    """What `compile_variant` takes, for a kernel that does nothing."""
    multiplying = (threads // 32 - 1) // 2 if matrix_warps is None else matrix_warps
    entries = dict.fromkeys(_ENTRIES, EntryUsage(0, 0, 0, 0))
    return CompiledVariant(
        arch, "empty", b"", "", entries, threads, dtype, multiplying, trace, rows, tuple(formats), ranked
    )


@dataclass
class Scarcity:
    """Lets `left` allocations succeed, fails the next one, and lets all others succeed. `held` names what is held."""

    left: int
    held: dict[object, str] = field(default_factory=dict)

    def take(self, what: str) -> None:
        """Raises GpuMemoryError if it is this allocation's turn to fail."""
        self.left -= 1
        if self.left == -1:
            raise GpuMemoryError(f"GPU memory: {what}")


@dataclass
class ScarceGpu(EmulatedGpu):
    """An emulated GPU whose memory, host words and granules count in `scarcity`."""

    scarcity: Scarcity = field(default_factory=lambda: Scarcity(10**9))
    index: int = 0

    def alloc(self, nbytes: int) -> Memory:
        self.scarcity.take(f"{nbytes} bytes")
        memory = super().alloc(nbytes)
        self.scarcity.held[self.index, memory.address] = f"{nbytes} bytes"
        return memory

    def free(self, memory: Memory) -> None:
        super().free(memory)
        del self.scarcity.held[self.index, memory.address]

    def alloc_host(self, words: int) -> HostWords:
        self.scarcity.take(f"{words} words")
        made = super().alloc_host(words)
        self.scarcity.held[made.address] = f"{words} words"
        return made

    def free_host(self, words: HostWords) -> None:
        super().free_host(words)
        del self.scarcity.held[words.address]

    def granules(self) -> EmulatedGranules:
        return _ScarceGranules(self.scarcity)

    def load(self, unit: CompiledUnit) -> dict[str, Any]:
        return dict.fromkeys(unit.entries)

    def launch(self, *_: Any, **__: Any) -> None:
        pass

    def elapsed_us(self, start: object, end: object) -> float:
        return 1.0

    def follow(self, other: EmulatedGpu) -> None:
        pass


class _ScarceGranules(EmulatedGranules):
    def __init__(self, scarcity: Scarcity) -> None:
        super().__init__()
        self._scarcity = scarcity

    def reserve(self, count: int) -> int:
        address = super().reserve(count)
        self._scarcity.held[self, address] = f"{count} granules reserved"
        return address

    def release(self, address: int, count: int) -> None:
        super().release(address, count)
        del self._scarcity.held[self, address]

    def create(self) -> int:
        self._scarcity.take("granule")
        granule = super().create()
        self._scarcity.held[self, granule] = "granule"
        return granule

    def destroy(self, granule: int) -> None:
        super().destroy(granule)
        del self._scarcity.held[self, granule]


@contextmanager
def scarce_torch(scarcity: Scarcity) -> Iterator[None]:
    """Within the block, the zeros that a session takes from torch count, too; torch frees them itself."""
    zeros = torch.zeros

    def take(*shape: Any, **asked: Any) -> torch.Tensor:
        scarcity.take("zeros of torch")
        return zeros(*shape, **asked)

    with patch("torch.zeros", take):
        yield


def walk(run: Callable[[Scarcity], None]) -> int:
    """Fail the first allocation of `run`, then the second, and so on, until a run has none left to fail. Nothing may be
    held after any of them. Returns the number of allocations."""
    for failing in count():
        scarcity, failed = Scarcity(failing), False
        try:
            run(scarcity)
        except GpuMemoryError:
            failed = True
        assert not scarcity.held, f"allocation {failing}: {list(scarcity.held.values())} are held"
        if not failed:
            return failing
    raise AssertionError
