"""What the stamps of a traced launch say: what each task did when, and how signals reached those who waited for them.

Pure: from the arrays of `LoadedProgram.read_trace` and `read_waits`, and the program that was packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.errors import TraceError
from flywheel.ir import Task
from flywheel.ir.access import MATRIX_OPS
from flywheel.vm.abi import Stamp
from flywheel.vm.pack import PackedProgram

Stamps = npt.NDArray[np.uint64]
"""[instruction, Stamp] in ns of the GPU's global timer; 0 is a stamp that was not passed."""
Waits = npt.NDArray[np.float64]
"""[SM, 2]: shares of the launch in which its loader stalled, and its matrix warps starved."""


class Phase(StrEnum):
    """What the vector warps of an SM are at in a task; phases follow each other without a gap, from CURRENT to DONE."""

    WAIT = "wait"
    """CURRENT to READY: for its counters, or for what it reads, where that is handed over by the data."""
    STAGE = "stage"
    """READY to STAGED: they make the vector to multiply (a norm, a merge), and stage it."""
    MULTIPLY = "multiply"
    """To MULTIPLIED: the matrix warps are at work, or wait for weights; sums of all passes but the last are in it."""
    FINISH = "finish"
    """MULTIPLIED to STORED: they add up the last pass, run the steps behind the product, and store."""
    RUN = "run"
    """READY to STORED of a task without a product."""
    SIGNAL = "signal"
    """STORED to DONE: the fence, and the signal; next to nothing where nobody asks for it."""


class PhaseSpan(NamedTuple):
    """One phase of a task, in us since the first stamp of the launch."""

    phase: Phase
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class TracedTask:
    """When a task ran and what it did, in us since the first stamp of the launch; a phase that it has not is absent."""

    task: Task
    sm: int
    current_us: float
    ready_us: float
    done_us: float
    phases: tuple[PhaseSpan, ...]


@dataclass(frozen=True, slots=True)
class LaunchTrace:
    """All tasks of one launch, SM after SM in queue order, on `sms` SMs.

    `stalled` is the share of the launch in which a mean SM's loader could not read on, the ring being full or the tasks
    too far ahead; `starved` that in which its matrix warps had their operand, and no weights.
    """

    tasks: tuple[TracedTask, ...]
    sms: int
    stalled: float
    starved: float

    @property
    def span_us(self) -> float:
        """From the first stamp of the launch to the last."""
        return max(traced.done_us for traced in self.tasks)


@dataclass(frozen=True, slots=True)
class HandOff:
    """A task, and of those whose signals it needs the `last` to give one.

    Where the data is handed over without signals, that is the last of its producers to be done, and `ready_us` is when
    what it reads was loaded.
    """

    task: TracedTask
    last: TracedTask

    @property
    def waited(self) -> bool:
        """Whether the task was there before the last signal. Otherwise its times say nothing of how signals travel."""
        return self.task.current_us < self.last.done_us

    @property
    def held_us(self) -> float:
        """Of a task that waited: until the last signal was given."""
        return self.last.done_us - self.task.current_us

    @property
    def latency_us(self) -> float:
        """From the last signal to the task's start. A sender stamps after it has signalled, and by the clock of another
        SM, so this may come out too small by as little as clocks are apart."""
        return self.task.ready_us - self.last.done_us


def read_stamps(packed: PackedProgram, stamps: Stamps, waits: Waits) -> LaunchTrace:
    """The trace of a launch of `packed` that left `stamps` and `waits`.

    Raises TraceError, naming the task, where a stamp is absent that the task must pass, there is one that it cannot
    pass, or times do not follow each other on an SM.
    """
    instructions = packed.instructions
    if stamps.shape != (len(instructions), len(Stamp)):
        raise TraceError(f"trace: stamps {list(stamps.shape)}; the program has {[len(instructions), len(Stamp)]}")
    if not len(instructions):
        raise TraceError("trace: the program has no tasks")
    _check_passed(packed, stamps)
    _check_order(packed, stamps)
    passed = stamps > 0
    times = np.where(passed, stamps - stamps[passed].min(), 0).astype(np.int64)
    tasks, sms = packed.program.tasks, instructions["sm"].tolist()
    traced = [
        _traced(tasks[place], sm, row, there)
        for place, sm, row, there in zip(
            instructions["task"].tolist(), sms, times.tolist(), passed.tolist(), strict=True
        )
    ]
    stalled, starved = waits.mean(axis=0).tolist()
    return LaunchTrace(tuple(traced), len(packed.queues) - 1, stalled, starved)


def hand_offs(trace: LaunchTrace) -> list[HandOff]:
    """The hand-off to each task that waits for any counter, in the order of the trace."""
    signals: dict[int, list[TracedTask]] = {}
    for traced in sorted(trace.tasks, key=lambda traced: traced.done_us):
        signals.setdefault(traced.task.out_counter, []).append(traced)
    found = []
    for traced in trace.tasks:
        last = [signals[wait.counter][wait.threshold - 1] for wait in traced.task.waits if wait.threshold > 0]
        if last:
            found.append(HandOff(traced, max(last, key=lambda producer: producer.done_us)))
    return found


_ALWAYS: Final = (Stamp.CURRENT, Stamp.READY, Stamp.STORED, Stamp.DONE)


def _check_passed(packed: PackedProgram, stamps: Stamps) -> None:
    """STAGED is optional: an operand may lie there already."""
    multiplies = _multiplies(packed)
    for stamp in _ALWAYS:
        _refuse(packed, stamps[:, stamp] == 0, f"has no stamp {stamp.name}")
    _refuse(packed, multiplies & (stamps[:, Stamp.MULTIPLIED] == 0), "multiplies, and has no stamp MULTIPLIED")
    for stamp in (Stamp.STAGED, Stamp.MULTIPLIED):
        _refuse(packed, ~multiplies & (stamps[:, stamp] > 0), f"multiplies nothing, and has a stamp {stamp.name}")


def _multiplies(packed: PackedProgram) -> npt.NDArray[np.bool_]:
    """Which instructions have a matrix step."""
    before = np.concatenate(([0], np.cumsum(np.isin(packed.steps["op"], list(MATRIX_OPS)))))
    first = packed.instructions["first_step"]
    found: npt.NDArray[np.bool_] = before[first + packed.instructions["n_steps"]] > before[first]
    return found


def _check_order(packed: PackedProgram, stamps: Stamps) -> None:
    latest = stamps[:, Stamp.CURRENT]
    for stamp in list(Stamp)[1:]:
        here = stamps[:, stamp]
        _refuse(packed, (here > 0) & (here < latest), f"comes to {stamp.name} before what stands before it")
        latest = np.maximum(latest, here)
    sms = packed.instructions["sm"]
    early = np.zeros(len(stamps), np.bool_)
    early[1:] = (sms[1:] == sms[:-1]) & (stamps[1:, Stamp.CURRENT] < stamps[:-1, Stamp.DONE])
    _refuse(packed, early, "begins before the task before it on its SM has ended")


def _refuse(packed: PackedProgram, wrong: npt.NDArray[np.bool_], why: str) -> None:
    """Raises TraceError for the first instruction that is wrong."""
    if not wrong.any():
        return
    instruction = packed.instructions[int(np.flatnonzero(wrong)[0])]
    others = f" (and {int(wrong.sum()) - 1} more)" if wrong.sum() > 1 else ""
    raise TraceError(f"trace: {packed.label(instruction['task'])} on SM {instruction['sm']} {why}{others}")


def _traced(task: Task, sm: int, times_ns: list[int], passed: list[bool]) -> TracedTask:
    current, ready, staged, multiplied, stored, done = (time / 1e3 for time in times_ns)
    bounds = [(Phase.WAIT, current, ready)]
    if passed[Stamp.MULTIPLIED]:
        begin = ready
        if passed[Stamp.STAGED]:
            bounds.append((Phase.STAGE, ready, staged))
            begin = staged
        bounds += [(Phase.MULTIPLY, begin, multiplied), (Phase.FINISH, multiplied, stored)]
    else:
        bounds.append((Phase.RUN, ready, stored))
    bounds.append((Phase.SIGNAL, stored, done))
    return TracedTask(task, sm, current, ready, done, tuple(PhaseSpan(*bound) for bound in bounds))
