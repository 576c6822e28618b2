"""From a program to its predicted latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Final

from flywheel.cost_model.engine import Queues, Rates, Trace, simulate
from flywheel.cost_model.machine import Machine, machine_for
from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import BufferKind, KernelVariant, MegakernelProgram, Task, variant_of
from flywheel.measure.floor import floor_us, weight_bytes_read

MODEL_VERSION: Final = "2"
"""Changes whenever the same program may get another prediction."""

STREAMED_KINDS: Final = frozenset({BufferKind.WEIGHT, BufferKind.KV_CACHE, BufferKind.CONST})
"""Inputs that `est_bytes` stands for; all others are activations, read when the task starts."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of one launch, and where each SM spends it; tuples are by SM.

    `busy_us` is work, `blocked_us` waiting for counters, `finish_us` the end of its last task; what is left of it was
    spent waiting for bytes.
    """

    latency_us: float
    floor_us: float
    busy_us: tuple[float, ...]
    blocked_us: tuple[float, ...]
    finish_us: tuple[float, ...]

    @property
    def starved_us(self) -> tuple[float, ...]:
        """Time that each SM spent waiting for weights and K/V."""
        return tuple(
            max(0.0, finish - busy - blocked)
            for finish, busy, blocked in zip(self.finish_us, self.busy_us, self.blocked_us, strict=True)
        )


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """When a task ran, from the start of the kernel."""

    task: int
    sm: int
    start_us: float
    end_us: float


def predict(program: MegakernelProgram, machine: Machine | None = None) -> Prediction:
    """Latency of one launch of `program`, a valid one, on its target; `machine` replaces the target's constants.

    Raises ConfigError for a program without target or SM assignment, InvalidProgramError for one that cannot finish.
    """
    machine, queues, _, trace = _run(program, machine, record=False)
    assert program.target is not None
    floor = floor_us(weight_bytes_read(program), program.target)
    work = queues.work_us
    bounds = zip(queues.first, queues.first[1:], strict=False)
    return Prediction(
        latency_us=max(floor, machine.launch_us + max(trace.finish_us)),
        floor_us=floor,
        busy_us=tuple(sum(work[first:end]) for first, end in bounds),
        blocked_us=tuple(trace.blocked_us),
        finish_us=tuple(trace.finish_us),
    )


def timeline(program: MegakernelProgram, machine: Machine | None = None) -> list[TaskSpan]:
    """The spans of all tasks, SM by SM in queue order. Raises as `predict` does."""
    _, queues, ordered, trace = _run(program, machine, record=True)
    sms = [sm for sm, (a, b) in enumerate(zip(queues.first, queues.first[1:], strict=False)) for _ in range(a, b)]
    return [
        TaskSpan(task.id, sm, start, end)
        for task, sm, start, end in zip(ordered, sms, trace.start_us, trace.end_us, strict=True)
    ]


def _run(
    program: MegakernelProgram, machine: Machine | None, record: bool
) -> tuple[Machine, Queues, list[Task], Trace]:
    variant = variant_of(program)
    assert program.target is not None
    if machine is None:
        machine = machine_for(program.target)
    by_sm = _by_sm(program.tasks, program.target.num_sms)
    ordered = [task for queue in by_sm for task in queue]
    queues = _queues(program, by_sm, ordered, variant, machine)
    rates = Rates(
        total=machine.read_gbs * 1e3,
        loader=machine.loader_rate(variant.chunk_bytes, variant.ring_bytes),
        visibility_us=machine.visibility_us,
        bubble_bytes=machine.bubble_us * machine.share,
        poll_us=machine.poll_us,
    )
    trace = simulate(queues, rates, record)
    if trace.stuck is not None:
        task = ordered[trace.stuck]
        raise InvalidProgramError(f"task {task.id} ({task.label}): never starts, its counters stay below {task.waits}")
    return machine, queues, ordered, trace


def _by_sm(tasks: Sequence[Task], num_sms: int) -> list[list[Task]]:
    queues: list[list[Task]] = [[] for _ in range(num_sms)]
    for task in tasks:
        sm = task.sm
        if sm is None or not 0 <= sm < num_sms:
            raise ConfigError(f"task {task.id} ({task.label}): sm={sm} is not in 0..{num_sms - 1}")
        queues[sm].append(task)
    return queues


def _queues(
    program: MegakernelProgram, by_sm: list[list[Task]], ordered: list[Task], variant: KernelVariant, machine: Machine
) -> Queues:
    depth = variant.prefetch_depth
    ahead = max(variant.ring_bytes - machine.in_flight_bytes, variant.chunk_bytes)
    work_us, tail_us = _costs(program, ordered, variant, machine)
    early: list[float] = []
    ends: list[int] = []
    limits: list[float] = []
    for queue in by_sm:
        stops = list(accumulate([task.est_bytes for task in queue]))
        reach = stops[depth:] + stops[-1:] * min(depth, len(stops))
        allowed = [min(ahead, stops[min(depth, len(stops)) - 1]) if depth and stops else 0.0]
        allowed += [stop + ahead if stop + ahead < most else most for stop, most in zip(stops, reach, strict=True)]
        for index, (before, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            if allowed[index] <= before < stop:  # nothing of it may come early: its first byte takes the whole latency
                tail_us[len(ends) + index] += machine.latency_us
        early.append(allowed[0])
        ends += stops
        limits += allowed[1:]
    first = [0, *accumulate(map(len, by_sm))]
    signal, gates, counter_gates, n_gates = _gates(ordered)
    return Queues(first, early, ends, limits, work_us, tail_us, signal, gates, counter_gates, n_gates)


def _costs(
    program: MegakernelProgram, ordered: list[Task], variant: KernelVariant, machine: Machine
) -> tuple[list[float], list[float]]:
    """(work, time from the last chunk's arrival to the end) of each task."""
    consumer, warps, chunk = machine.consumer, variant.matrix_warps, variant.chunk_bytes
    task_us, byte_us = consumer.task_us(warps), 1 / consumer.rate(warps)
    flop_us = 1 / (consumer.flops_per_warp_us * warps)
    activation_us = 1 / (machine.activation_gbs * 1e3)
    sizes = {buffer.id: buffer.nbytes for buffer in program.buffers if buffer.kind not in STREAMED_KINDS}
    known: dict[tuple[int, int, int], tuple[float, float]] = {}
    work_us, tail_us = [], []
    for task in ordered:
        key = (task.est_bytes, task.est_flops, id(task.inputs))
        cost = known.get(key)
        if cost is None:
            streamed = task.est_bytes
            read = sum(sizes.get(buffer, 0) for buffer in task.inputs)
            work = task_us + read * activation_us + max(streamed * byte_us, task.est_flops * flop_us)
            work += ceil(streamed / chunk) * consumer.chunk_us
            tail = consumer.chunk_us + min(chunk, streamed) * byte_us if streamed else 0.0
            cost = known[key] = (work, tail)
        work_us.append(cost[0])
        tail_us.append(cost[1])
    return work_us, tail_us


def _gates(ordered: list[Task]) -> tuple[list[int], list[tuple[int, ...]], list[list[tuple[int, int]]], int]:
    """(counter that each task signals, gates that it awaits, per counter its gates ascending, number of gates)."""
    counters: dict[int, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    known: dict[int, tuple[int, ...]] = {}
    gates = []
    for task in ordered:
        waits = task.waits
        awaited = known.get(id(waits))
        if awaited is None:
            pairs = [(counters.setdefault(w.counter, len(counters)), w.threshold) for w in waits if w.threshold > 0]
            awaited = known[id(waits)] = tuple(numbers.setdefault(pair, len(numbers)) for pair in pairs)
        gates.append(awaited)
    signal = [counters.setdefault(task.out_counter, len(counters)) for task in ordered]
    chains: list[list[tuple[int, int]]] = [[] for _ in counters]
    before = [0] * len(counters)
    for (counter, threshold), gate in sorted(numbers.items()):
        chains[counter].append((gate, threshold - before[counter]))
        before[counter] = threshold
    return signal, gates, chains, len(numbers)
