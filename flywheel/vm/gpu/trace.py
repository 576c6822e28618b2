"""Reads the stamps of a traced launch: when each task did what, and how long signals took to reach waiting tasks.

The functions are pure. They take the arrays of `LoadedProgram.read_trace` and `read_waits`, and the packed program.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.errors import TraceError
from flywheel.ir import Task
from flywheel.ir.operations import PRODUCTS
from flywheel.vm.abi import Stamp
from flywheel.vm.pack import PackedProgram

Stamps = npt.NDArray[np.uint64]
"""[instruction, Stamp] in ns of the GPU's global timer; 0 is a stamp that the task did not set."""
Waits = npt.NDArray[np.float64]
"""[SM, 3]: the shares of the launch in which the SM's loader stalled, in which its matrix warps starved, and in which
they awaited an operand."""


class Phase(StrEnum):
    """A phase of a task on an SM's vector warps. Phases follow each other without gaps, from CURRENT to DONE."""

    WAIT = "wait"
    """CURRENT to READY: the task waits for its counters or, where data is handed over without them, for that data."""
    STAGE = "stage"
    """READY to STAGED: the vector warps compute the vector to multiply (a norm, a merge) and stage it."""
    MULTIPLY = "multiply"
    """To MULTIPLIED: the matrix warps multiply or wait for weights. It includes the sums of all passes but the last."""
    FINISH = "finish"
    """MULTIPLIED to STORED: the vector warps sum the last pass, run the steps after the product, and store."""
    RUN = "run"
    """READY to STORED of a task without a matrix product."""
    SIGNAL = "signal"
    """STORED to DONE: the fence and the signal. It is nearly 0 where no task waits for the signal."""


class PhaseSpan(NamedTuple):
    """One phase of a task, in us since the first stamp of the launch."""

    phase: Phase
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class TracedTask:
    """When a task ran, in us since the first stamp of the launch, and its phases, only those that it has."""

    task: Task
    sm: int
    current_us: float
    ready_us: float
    done_us: float
    phases: tuple[PhaseSpan, ...]

    @property
    def stored_us(self) -> float:
        """When its results were stored."""
        return self.phases[-1].start_us


@dataclass(frozen=True, slots=True)
class Exchange:
    """A task that adds partial sums of several GPUs, and the `last` task, on any of them, that stored one of them."""

    task: TracedTask
    last: TracedTask

    @property
    def exposed_us(self) -> float:
        """Time from the arrival of the last partial sum to the stored result: the exposed cost of the all-reduce."""
        return self.task.stored_us - self.last.stored_us


@dataclass(frozen=True, slots=True)
class LaunchTrace:
    """All tasks of one launch on `sms` SMs, SM after SM, each in queue order.

    `stalled`, `starved` and `awaiting` are shares of the launch, averaged over SMs. A loader is stalled while it may
    not read on, since the ring is full or its next task too far ahead. Matrix warps are starved while they have their
    operand but no weights, and awaiting while they wait for an operand.
    """

    tasks: tuple[TracedTask, ...]
    sms: int
    stalled: float
    starved: float
    awaiting: float
    exchanges: tuple[Exchange, ...] = ()
    """Where several GPUs add up their results, each sum of each GPU."""

    @property
    def span_us(self) -> float:
        """From the first stamp of the launch to the last."""
        return max(traced.done_us for traced in self.tasks)


@dataclass(frozen=True, slots=True)
class HandOff:
    """A task, and the `last` of the tasks whose signals it waits for to give its signal.

    Where data is handed over without signals, `last` is the last of the task's producers to finish, and `ready_us` is
    the time at which the task had loaded that data.
    """

    task: TracedTask
    last: TracedTask

    @property
    def waited(self) -> bool:
        """Whether the task began to wait before the last signal. Otherwise its times say nothing about signals."""
        return self.task.current_us < self.last.done_us

    @property
    def held_us(self) -> float:
        """Time in us from the start of a task's wait to the last signal. Only for a task that `waited`."""
        return self.last.done_us - self.task.current_us

    @property
    def latency_us(self) -> float:
        """Time in us from the last signal to the task's start.

        It may come out slightly too small: the sender stamps after its signal, and by the clock of another SM.
        """
        return self.task.ready_us - self.last.done_us


def read_stamps(packed: PackedProgram, stamps: Stamps, waits: Waits) -> LaunchTrace:
    """The trace of a launch of `packed` that left `stamps` and `waits`.

    Raises TraceError, which names the task, where a task lacks a stamp that it must set, has one that it cannot set, or
    where times on an SM are out of order.
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
    traced = []
    rows = zip(instructions["task"].tolist(), sms, times.tolist(), passed.tolist(), strict=True)
    for index, (place, sm, row, there) in enumerate(rows):
        total = packed.sums.get(index)
        if total is None:
            traced.append(_traced(tasks[place], sm, row, there))
        else:
            traced += _with_sum(tasks[place], tasks[total], sm, row, there)
    stalled, starved, awaiting = waits.mean(axis=0).tolist()
    return LaunchTrace(tuple(traced), len(packed.queues) - 1, stalled, starved, awaiting)


def hand_offs(trace: LaunchTrace) -> list[HandOff]:
    """The hand-off to each task that waits for any counter, in the order of the trace. A sum that a product does in its
    place waits for none."""
    signals: dict[int, list[TracedTask]] = {}
    for traced in sorted(trace.tasks, key=lambda traced: traced.done_us):
        signals.setdefault(traced.task.out_counter, []).append(traced)
    found = []
    for traced in trace.tasks:
        last = [signals[wait.counter][wait.threshold - 1] for wait in traced.task.waits if wait.threshold > 0]
        if last and traced.phases[0].phase is Phase.WAIT:
            found.append(HandOff(traced, max(last, key=lambda producer: producer.done_us)))
    return found


_ALWAYS: Final = (Stamp.CURRENT, Stamp.READY, Stamp.STORED, Stamp.DONE)


def _check_passed(packed: PackedProgram, stamps: Stamps) -> None:
    """Check that each task has the stamps that it must have. STAGED is optional: the operand may be staged already."""
    multiplies = _multiplies(packed)
    for stamp in _ALWAYS:
        _refuse(packed, stamps[:, stamp] == 0, f"has no stamp {stamp.name}")
    _refuse(packed, multiplies & (stamps[:, Stamp.MULTIPLIED] == 0), "multiplies, and has no stamp MULTIPLIED")
    for stamp in (Stamp.STAGED, Stamp.MULTIPLIED):
        _refuse(packed, ~multiplies & (stamps[:, stamp] > 0), f"multiplies nothing, and has a stamp {stamp.name}")


def _multiplies(packed: PackedProgram) -> npt.NDArray[np.bool_]:
    """Which instructions have a matrix step."""
    before = np.concatenate(([0], np.cumsum(np.isin(packed.steps["op"], list(PRODUCTS)))))
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
    """Raise TraceError for the first wrong instruction, if any."""
    if not wrong.any():
        return
    instruction = packed.instructions[int(np.flatnonzero(wrong)[0])]
    others = f" (and {int(wrong.sum()) - 1} more)" if wrong.sum() > 1 else ""
    raise TraceError(f"trace: {packed.label(instruction['task'])} on SM {instruction['sm']} {why}{others}")


def _with_sum(product: Task, total: Task, sm: int, times_ns: list[int], passed: list[bool]) -> list[TracedTask]:
    """A product that adds shards, up to what it sends, and the sum from there to the end, without a phase WAIT."""
    *before, stored, done = times_ns
    begin, end = stored / 1e3, done / 1e3
    phases = (PhaseSpan(Phase.RUN, begin, end), PhaseSpan(Phase.SIGNAL, end, end))
    return [
        _traced(product, sm, [*before, stored, stored], passed),
        TracedTask(total, sm, begin, begin, end, phases),
    ]


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
