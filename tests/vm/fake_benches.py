"""Stand-ins for a bench on a GPU, in a module of their own so that a spawned worker can find them.

What a fake does with a program is in its `meta["act"]`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flywheel.errors import (
    ConfigError,
    GpuFaultError,
    GpuMemoryError,
    InvalidProgramError,
    KernelCompileError,
    LaunchTimeoutError,
    NoGpuError,
)
from flywheel.ir import MegakernelProgram
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Incorrect, Measured, TrialOutcome
from flywheel.measure.verdict import judge
from flywheel.vm.worker import enter_phase

ERRORS = {
    "time out": LaunchTimeoutError("task 3 (L0.q) waits for counter 2: 1 of 6 after 0.5 s", 0.5),
    "fault": GpuFaultError("launch: an illegal memory access"),
    "memory": GpuMemoryError("workspace: 9 GB wanted, 1 GB free"),
    "compile": KernelCompileError("vm_loop.cuh(12): error: expected a ;"),
    "config": ConfigError("grid of 140 blocks; 132 are co-resident"),
    "invalid": InvalidProgramError("task 9: opcode ALLREDUCE_SHARD has no kernel"),
    "surprise": ZeroDivisionError("division\nby zero"),
}


@dataclass(frozen=True)
class Fake:
    """Writes its process id to `folder` as it starts; `meta["act"]` of a program says what it does."""

    folder: str

    def measure(self, program: MegakernelProgram) -> TrialOutcome:
        act = str(program.meta.get("act", "measure"))
        if act in ERRORS:
            raise ERRORS[act]
        match act:
            case "hang":
                time.sleep(60)
            case "hang in C":
                ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock: no thread of this process runs
            case "segfault":
                ctypes.string_at(0)
            case "killed" | "stopped":
                os.kill(os.getpid(), signal.SIGKILL if act == "killed" else signal.SIGSTOP)
            case "killed once" if self._first("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "wrong" | "nan":
                error = float("nan") if act == "nan" else 0.5
                verdict = judge(error=error, where="logits", positions=[1], dtype="F32")
                return Incorrect(verdict, verdict.reason or "")
            case "chatter":
                sys.stdout.write('{"this is": "not the result"}\n')
                sys.stdout.flush()
                os.write(1, b"\x00\xffgarbage\n")
        return measured()

    def _first(self, mark: str) -> bool:
        path = Path(self.folder) / mark
        if path.exists():
            return False
        path.touch()
        return True


def measured() -> Measured:
    """What every good program gets."""
    verdict = judge(error=1e-6, where="logits", positions=[1], dtype="F32")
    return Measured(MeasuredLatency(2.0, 1.0, 3.0, 30, 5, "flushed"), verdict)


def make_fake(folder: str) -> Fake:
    """Counts its starts in `folder`."""
    with (Path(folder) / "starts").open("a", encoding="utf-8") as stream:
        stream.write(f"{os.getpid()}\n")
    return Fake(folder)


class StoppedBefore:
    """Stops its worker while the worker still unpickles what it is to make."""

    def __setstate__(self, state: object) -> None:
        stop()

    def __getstate__(self) -> object:
        return "state"

    def __call__(self) -> Fake:
        raise AssertionError


class SlowToArrive(StoppedBefore):
    """Lets its worker import for ever."""

    def __setstate__(self, state: object) -> None:
        time.sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_at_the_start() -> Fake:
    stop()
    raise AssertionError


def stopped_in_a_phase() -> Fake:
    enter_phase("loads weights", 60.0)
    stop()
    raise AssertionError


def slow_in_a_phase() -> Fake:
    enter_phase("opens the GPU", 1.0)
    time.sleep(60)
    raise AssertionError


def without_a_gpu() -> Fake:
    raise NoGpuError("device cuda: this machine has no GPU")


def without_a_package() -> Fake:
    import a_package_that_is_not_installed  # type: ignore[import-not-found]

    return Fake(str(a_package_that_is_not_installed))


def dying_at_the_start() -> Fake:
    os._exit(7)


def never_ready() -> Fake:
    time.sleep(60)
    raise AssertionError
