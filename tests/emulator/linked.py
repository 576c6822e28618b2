"""Emulated GPUs of one memory that pass data to and fro: the probe of a link, on its kernel's own sources."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from emulator.gpu import FLAGS, WHY_BYTES, EmulatedGpu
from emulator.translate import translate

from flywheel.errors import GpuFaultError
from flywheel.vm.gpu.nvrtc import CompiledUnit, EntryUsage
from flywheel.vm.gpu.sources import SOURCES

COPY_US: Final = 1000.0
"""The time between two events of an emulated GPU."""

_LAUNCHER: Final = """
char probe_slots[1];
struct Passing {
    uint4 *mine, *theirs;
    int rounds, most_polls, leads;
    uint32_t* ticks;
    uint64_t* told;
};
extern "C" int emulate_pass_data(const Passing* each, int ranks, int blocks, unsigned seed, double limit_s, char* why,
                                 size_t room) {
    emulator::Launches launches{ranks, 1};
    emulator::entry = [=] {
        const Passing& own = each[emulator::current->warp->block->rank];
        pass_data(own.mine, own.theirs, own.rounds, own.most_polls, own.leads, own.ticks, own.told);
    };
    try {
        return emulator::run(blocks, 32, 0, seed, limit_s, launches) ? 0 : 1;
    } catch (const emulator::Failure& failure) {
        snprintf(why, room, "%s", failure.what.c_str());
        return 2;
    }
}
"""


class Passing(ctypes.Structure):
    """The arguments of pass_data."""

    _fields_ = (
        ("mine", ctypes.c_void_p), ("theirs", ctypes.c_void_p), ("rounds", ctypes.c_int), ("most_polls", ctypes.c_int),
        ("leads", ctypes.c_int), ("ticks", ctypes.c_void_p), ("told", ctypes.c_void_p),
    )  # fmt: skip


def build_probes(folder: Path) -> CompiledUnit:
    """The unit of probes as a library for the CPU, with `pass_data` alone."""
    library = folder / "probes.so"
    text = translate(SOURCES, "probes.cu", {"__CUDA_ARCH__": "900"}, _LAUNCHER)
    subprocess.run(["g++", *FLAGS, "-x", "c++", "-", "-o", library], input=text, text=True, check=True)
    return CompiledUnit("sm_90a", "probes", str(library).encode(), "", {"pass_data": EntryUsage(0, 0, 0, 0)})


@dataclass
class LinkedGpu(EmulatedGpu):
    """One GPU of several, which runs a launch of one block when another one has its launch too.

    With `absent` it forgets such launches, as a GPU that hangs. `joined` has the GPUs whose memory it may access,
    unless `cut`, and `calls` is what all of them were asked to do, in order.
    """

    index: int = 0
    pci_bus_id: str = "0000:00:00.0"
    absent: bool = False
    cut: bool = False
    waiting: list[Passing] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)

    def reaches(self, other: Self) -> bool:
        return not self.cut

    def join(self, other: Self) -> None:
        self.joined.append(other.index)

    def make_current(self) -> None:
        self.calls.append(f"current {self.index}")

    def launch(self, kernel: Any, grid: int, block: int, args: tuple[Any, ...], **_: Any) -> None:
        given = Passing(*[getattr(each, "value", each) for each in args])
        self.calls.append(f"launch {self.index} {given.rounds}")
        if grid == 2 or not given.rounds:
            self._run(kernel, [given], grid)
            return
        if not self.absent:
            self.waiting.append(given)
        if len(self.waiting) == 2 or (self.absent and self.waiting):
            pair = list(self.waiting)
            self.waiting.clear()
            self._run(kernel, pair, 1)

    def _run(self, kernel: Any, each: list[Passing], blocks: int) -> None:
        why = ctypes.create_string_buffer(WHY_BYTES)
        ended = kernel(
            (Passing * len(each))(*each), ctypes.c_int(len(each)), ctypes.c_int(blocks), ctypes.c_uint(self.seed),
            ctypes.c_double(self.limit_s), why, ctypes.c_size_t(WHY_BYTES),
        )  # fmt: skip
        if ended:
            raise GpuFaultError(why.value.decode() or f"launch: not over after {self.limit_s:g} s")

    def elapsed_us(self, start: Any, end: Any) -> float:
        return COPY_US

    def sync(self) -> None:
        self.calls.append(f"sync {self.index}")
