"""Stand-ins for a measurement, in a module of their own so that a process pool can find them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import NoGpuError
from flywheel.ir import MegakernelProgram
from flywheel.measure.environment import Environment, capture_environment
from flywheel.measure.latency import MeasuredLatency, PredictedLatency
from flywheel.measure.outcome import Contest, Crashed, Measured, Predicted, TrialOutcome
from flywheel.measure.tenants import Attendant, GpuPresence, Tenant
from flywheel.measure.verdict import judge
from flywheel.plan import variant_of
from flywheel.vm.watching import tell
from flywheel.vm.worker import Parcel


def smooth(program: MegakernelProgram) -> TrialOutcome:
    """Best with deep prefetch and many threads."""
    variant = variant_of(program)
    latency_us = 100.0 - 2.0 * variant.prefetch_depth - variant.matrix_warps + len(program.tasks) / 100
    return Predicted(PredictedLatency(latency_us, MODEL_VERSION))


def fragile(program: MegakernelProgram) -> TrialOutcome:
    """As `smooth`, but what prefetches deeper than two instructions crashes."""
    return Crashed("too deep", transient=False) if variant_of(program).prefetch_depth > 2 else smooth(program)


def deadly(program: MegakernelProgram) -> TrialOutcome:
    """As `smooth`, but a depth of 4 takes the process with it."""
    if variant_of(program).prefetch_depth == 4:
        os._exit(3)
    return smooth(program)


class ToyBench:
    """Measures what `smooth` says. At a depth of 4 the `fault` happens first; `once` leaves a mark so that it does not
    happen again. `folder` collects the process ids of the stations that asked, a line an attempt at that depth."""

    def __init__(self, folder: str, fault: str, once: bool) -> None:
        self._folder, self._fault, self._once = Path(folder), fault, once

    def measure(self, program: MegakernelProgram) -> TrialOutcome:
        if variant_of(program).prefetch_depth == 4:
            with (self._folder / "attempts").open("a") as stream:
                stream.write(f"{os.getppid()}\n")
            if not (self._once and self._happened()):
                self._happen()
        return measured(toy_us(program), 30)

    def compare(self, program: MegakernelProgram, rivals: Sequence[MegakernelProgram], rounds: int) -> Contest:
        return contest(self.measure(program), (program, *rivals), rounds)

    def _happened(self) -> bool:
        mark = self._folder / "happened"
        if mark.exists():
            return True
        mark.touch()
        return False

    def _happen(self) -> None:
        match self._fault:
            case "child":
                os.kill(os.getpid(), signal.SIGKILL)
            case "station":
                kill_station()
            case "hang":
                time.sleep(600)
            case "wait":
                deadline = time.monotonic() + 60
                while not (self._folder / "prepared").exists():
                    assert time.monotonic() < deadline, "nothing was prepared meanwhile"
                    time.sleep(0.01)


def make_toy(folder: str, fault: str = "none", once: bool = False) -> ToyBench:
    """For a child of a station."""
    return ToyBench(folder, fault, once)


def make_plain(model: str, dtype: str, context: int, batch: int, weights: str | None, ranks: int) -> ToyBench:
    """As `measuring.make_bench`."""
    return ToyBench(".", "none", once=False)


def make_broken(folder: str) -> ToyBench:
    """Starts once in a folder, and never again."""
    mark = Path(folder) / "started"
    if mark.exists():
        raise NoGpuError("device cuda: fell off the bus")
    mark.touch()
    return ToyBench(folder, "child", once=False)


def mark_shallow(folder: str, program: MegakernelProgram) -> None:
    """Says that a program of another depth than 4 has been prepared."""
    if variant_of(program).prefetch_depth != 4:
        (Path(folder) / "prepared").touch()


def mark_until_stopped(folder: str, stopped: Callable[[], bool]) -> None:
    """Says that it has begun, and that it was told to stop."""
    (Path(folder) / "begun").touch()
    while not stopped():
        time.sleep(0.01)
    (Path(folder) / "stopped").touch()


def here() -> Environment:
    """This machine, with the GPU that TOY_GPU names."""
    return replace(capture_environment(), gpu=os.environ.get("TOY_GPU", "NVIDIA H100"))


def die_at_first(folder: str, deaths: int) -> Environment:
    """As `here`, but the first so many processes that ask are killed. Marks are made one process at a time."""
    marks = Path(folder) / f"death {os.getpid()}"
    if len(list(Path(folder).glob("death *"))) < deaths:
        marks.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return here()


def stop_at_first(folder: str) -> Environment:
    """As `here`, but the first process that asks is stopped."""
    mark = Path(folder) / "stopped"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return here()


def make_after_a_stop(folder: str) -> ToyBench:
    """As `make_toy`, but the first process that asks is stopped."""
    stop_at_first(folder)
    return ToyBench(folder, "none", once=False)


def make_at_last(folder: str, deaths: int) -> ToyBench:
    """As `make_toy`, but the first so many processes that ask are killed."""
    die_at_first(folder, deaths)
    return ToyBench(folder, "none", once=False)


def toy_us(program: MegakernelProgram) -> float:
    outcome = smooth(program)
    assert isinstance(outcome, Predicted)
    return outcome.latency.latency_us


def measured(latency_us: float, samples: int) -> Measured:
    """What a good program gets."""
    verdict = judge(error=0.0, where="logits", positions=[1], dtype="BF16")
    return Measured(MeasuredLatency(latency_us, latency_us, latency_us, samples, 3, "flushed"), verdict)


class Reckless:
    """Measures what `smooth` says, but at one time in ten it, or its station, dies instead, and at one in fifty hangs.

    What happens depends on the process and on how often it was asked, so that nothing dies for ever.
    """

    def __init__(self) -> None:
        self._chance = random.Random(os.getpid())

    def measure(self, program: MegakernelProgram) -> TrialOutcome:
        fate = self._chance.random()
        if fate < 0.02:
            time.sleep(600)
        if fate < 0.12:
            kill_station() if fate < 0.05 else os.kill(os.getpid(), signal.SIGKILL)
        return measured(toy_us(program), 30)

    def compare(self, program: MegakernelProgram, rivals: Sequence[MegakernelProgram], rounds: int) -> Contest:
        return contest(self.measure(program), (program, *rivals), rounds)


class Paired:
    """Measures what `smooth` says. Of its first `count` measurements, each ends when another process that measures has
    begun as many."""

    def __init__(self, folder: str, count: int) -> None:
        self._folder, self._count, self._begun = Path(folder), count, 0

    def measure(self, program: MegakernelProgram) -> TrialOutcome:
        self._begun += 1
        if self._begun <= self._count:
            (self._folder / f"begun-{self._begun}-{os.getpid()}").touch()
            deadline = time.monotonic() + 100
            while len(list(self._folder.glob(f"begun-{self._begun}-*"))) < 2:
                assert time.monotonic() < deadline, f"measurement {self._begun} was alone"
                time.sleep(0.01)
        return measured(toy_us(program), 30)

    def compare(self, program: MegakernelProgram, rivals: Sequence[MegakernelProgram], rounds: int) -> Contest:
        return contest(self.measure(program), (program, *rivals), rounds)


def attend(pause: Callable[[float], bool]) -> Attendant:
    """Of a GPU on which somebody computes for the first two looks."""
    busy, clock = iter([(Tenant(4711, "train", 7, 90),)] * 2), iter(range(10**6))
    return Attendant(lambda: GpuPresence(next(busy, ())), tell, lambda seconds: False, lambda: float(next(clock)))


def parcel(folder: str, program: MegakernelProgram) -> Parcel:
    """Says that a program was wrapped."""
    with (Path(folder) / "wrapped").open("a") as stream:
        stream.write("one\n")
    return Parcel(pickle.dumps(program))


def kill_station() -> None:
    """Kill the parent, and nobody else who adopted this process after it."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == os.getppid():
        os.kill(parent.pid, signal.SIGKILL)
    time.sleep(600)


def contest(outcome: TrialOutcome, programs: Sequence[MegakernelProgram], rounds: int) -> Contest:
    """Of programs without any noise."""
    times = tuple(((toy_us(program),) * 30,) * rounds for program in programs)
    return Contest(outcome, tuple(measured(toy_us(program), 30) for program in programs[1:]), times)
