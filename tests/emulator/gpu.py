"""A GPU of this machine's memory, on which the CUDA VM's own sources run: `flywheel.vm.gpu.driver.Gpu`, slowly.

Needs g++.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from emulator.granules import EmulatedGranules
from emulator.translate import translate

from flywheel.errors import GpuFaultError, TensorError
from flywheel.ir import DType
from flywheel.plan.features import macros_of
from flywheel.plan.variant import WARP
from flywheel.vm.gpu.driver import HostWord, HostWords, Memory
from flywheel.vm.gpu.nvrtc import CompiledUnit, CompiledVariant, EntryUsage
from flywheel.vm.gpu.sources import SOURCES

FLAGS: Final = (
    "-O1", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-w",
)  # fmt: skip
ARCH_MACROS: Final = {"sm_80": "800", "sm_90a": "900"}
WHY_BYTES: Final = 256
ALIGNMENT: Final = 256

_ENTRIES: Final = ("megakernel", "pack_matrix", "pack_codes", "expand_scales", "advance_rows")
_OWN: Final = tempfile.TemporaryDirectory(prefix="emulator-")
KERNELS: Final = "EMULATOR_KERNELS"
"""Where built kernels are kept for other processes; without it, each process builds its own."""
KEPT_S: Final = 14 * 86400
"""How long a kernel is kept that nobody uses."""


def build_variant(
    arch: str,
    threads: int,
    dtype: DType,
    cache_dir: Path | None = None,
    *,
    matrix_warps: int | None = None,
    rows: int = 0,
    formats: Sequence[int] = (),
    trace: bool = False,
    every_thread: bool = False,
    ranked: bool = False,
    features: Sequence[str] = (),
    sources: Path = SOURCES,
) -> CompiledVariant:
    """What `compile_variant` takes and gives, but `cubin` is the path of a shared library for the CPU."""
    multiplying = (threads // WARP - 1) // 2 if matrix_warps is None else matrix_warps
    defines = {
        "FW_THREADS": str(threads), "FW_MATRIX_WARPS": str(multiplying), "FW_DTYPE": str(int(dtype)),
        "__CUDA_ARCH__": ARCH_MACROS[arch],
    }  # fmt: skip
    if rows:
        defines["FW_ROWS"] = str(rows)
    if formats:
        defines["FW_FORMATS"] = ",".join(map(str, formats))
    wanted = {"FW_TRACE": trace, "FW_EVERY_THREAD": every_thread, "FW_RANKS": ranked}
    defines |= {name: "1" for name, asked in wanted.items() if asked} | macros_of(features)
    # Sources that a test has changed may change again under the same name.
    make = _known_library if sources == SOURCES else _library
    library = make(sources, tuple(defines.items()))
    usage = EntryUsage(registers=0, static_shared_bytes=0, stack_bytes=0, spill_bytes=0)
    entries = dict.fromkeys(_ENTRIES, usage)
    return CompiledVariant(
        arch, library.stem, os.fsencode(library), "", entries, threads, dtype, multiplying, trace, rows,
        tuple(formats), ranked, tuple(features),
    )


def _library(sources: Path, defines: tuple[tuple[str, str], ...]) -> Path:
    """A kernel's shared library, built where no process has."""
    text = translate(sources, "megakernel.cu", dict(defines))
    key = hashlib.sha256(" ".join([*FLAGS, text]).encode()).hexdigest()
    folder = Path(os.environ.get(KERNELS) or _OWN.name)
    library, lock = folder / f"{key}.so", folder / f"{key}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # whoever comes second waits, and builds nothing
        if not library.exists():
            _forget_old(folder)
            unfinished = library.with_suffix(f".{os.getpid()}")
            subprocess.run(["g++", *FLAGS, "-x", "c++", "-", "-o", unfinished], input=text, text=True, check=True)
            unfinished.replace(library)
        os.utime(library)
    return library


_known_library = cache(_library)


def _forget_old(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has finished or forgotten it meanwhile
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


@dataclass
class EmulatedGpu:
    """Memory is the process's own, so that a CPU tensor's address is a device address. Launches end before they return.

    `seed` draws the order in which warps run and when copies land; 0 is one plain order. `limit_s` bounds a launch.
    """

    sm_arch: int = 90
    num_sms: int = 4
    smem_optin_bytes: int = 232448
    seed: int = 1
    limit_s: float = 120.0
    name: str = "emulated"
    l2_bytes: int = 50 * 2**20
    total_bytes: int = 2**32
    cuda_version: str = "13.0"
    uploaded_bytes: int = 0
    broken: bool = False
    _held: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.abort_flag = HostWord(ctypes.addressof(self._word), ctypes.addressof(self._word))

    def alloc(self, nbytes: int) -> Memory:
        held = np.full(nbytes + ALIGNMENT, 0x5A, np.uint8)
        address = -(-held.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._held[address] = held
        return Memory(address, nbytes)

    def free(self, memory: Memory) -> None:
        del self._held[memory.address]

    def free_bytes(self) -> int:
        return self.total_bytes

    def granules(self) -> EmulatedGranules:
        return EmulatedGranules()

    def upload(self, memory: Memory, array: npt.NDArray[Any], offset: int = 0) -> None:
        elements = np.ascontiguousarray(array)
        _check_range(memory, offset, elements.nbytes)
        ctypes.memmove(memory.address + offset, elements.ctypes.data, elements.nbytes)
        self.uploaded_bytes += elements.nbytes

    def download(
        self, memory: Memory, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> npt.NDArray[Any]:
        array = np.empty(shape, dtype)
        _check_range(memory, offset, array.nbytes)
        ctypes.memmove(array.ctypes.data, memory.address + offset, array.nbytes)
        return array

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def fill(self, memory: Memory, byte: int) -> None:
        ctypes.memset(memory.address, byte, memory.nbytes)

    def alloc_host(self, count: int) -> HostWords:
        array = np.full(count, 0x5A5A5A5A, np.uint32)
        return HostWords(array.ctypes.data, array)

    def free_host(self, words: HostWords) -> None:
        words.array[:] = 0x5A5A5A5A

    def fetch(self, words: HostWords, index: int, source: int, count: int) -> None:
        ctypes.memmove(words.address + 4 * index, source, 4 * count)

    def send(self, target: int, words: HostWords, index: int, count: int) -> None:
        ctypes.memmove(target, words.address + 4 * index, 4 * count)

    def load(self, unit: CompiledUnit) -> dict[str, Any]:
        library = ctypes.CDLL(os.fsdecode(unit.cubin))
        return {name: library[f"emulate_{name}"] for name in unit.entries}

    def coresident_blocks(self, kernel: Any, block: int, smem_bytes: int) -> int:
        return 16

    def launch(
        self,
        kernel: Any,
        grid: int,
        block: int,
        args: tuple[Any, ...],
        *,
        smem_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Run a grid to its end. Raises GpuFaultError for what would break a GPU, and for a launch beyond the limit."""
        why = ctypes.create_string_buffer(WHY_BYTES)
        given = [ctypes.c_void_p(arg) if isinstance(arg, int) else arg for arg in args]
        ended = kernel(
            *given, ctypes.c_int(grid), ctypes.c_int(block), ctypes.c_size_t(smem_bytes), ctypes.c_uint(self.seed),
            ctypes.c_double(self.limit_s), why, ctypes.c_size_t(WHY_BYTES),
        )  # fmt: skip
        if ended:
            raise GpuFaultError(why.value.decode() or f"launch: not over after {self.limit_s:g} s")

    def record(self) -> None:
        """No event: nothing is under way when a launch has returned."""

    def wait(self, event: None, limit_s: float) -> bool:
        return True

    def elapsed_us(self, start: None, end: None) -> float:
        return 1.0

    def sync(self) -> None:
        pass


def _check_range(memory: Memory, offset: int, nbytes: int) -> None:
    if not 0 <= offset <= offset + nbytes <= memory.nbytes:
        raise TensorError(f"{nbytes} bytes at {offset} exceed {memory.nbytes} bytes of memory")
