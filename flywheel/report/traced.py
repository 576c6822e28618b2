"""A traced launch by operation: how its time was spent, and the cost of its hand-offs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from flywheel.cost_model import TaskSpan
from flywheel.ir import MegakernelProgram
from flywheel.report.layer import layer_number, operation
from flywheel.vm.gpu.trace import HandOff, LaunchTrace, Phase, TracedTask, hand_offs


@dataclass(frozen=True, slots=True)
class TracedTimeline:
    """A traced launch as a Timeline, for `layer` and `shares`."""

    program: MegakernelProgram
    spans: tuple[TaskSpan, ...]
    sms: int


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """One operation, over all layers. `bytes` are those of weights, constants and KV caches, counted by the lowerer for
    the last position of the context.

    `sm_us` is an SM's mean time in the operation, waiting included; `phases_us` divides it by Phase, in order.
    `busy_us` is the time in which at least one SM is between start and store of a task of the operation. `gbs` is bytes
    / `busy_us`, or None without bytes or time. It exceeds the memory's rate if weights were prefetched.
    """

    operation: str
    tasks: int
    bytes: int
    sm_us: float
    phases_us: Mapping[Phase, float]
    busy_us: float

    @property
    def gbs(self) -> float | None:
        """GB/s while the operation runs."""
        return self.bytes / self.busy_us / 1e3 if self.bytes and self.busy_us else None

    def share(self, phase: Phase) -> float:
        """A phase's share of the operation's time."""
        return self.phases_us[phase] / self.sm_us if self.sm_us else 0.0


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """When an operation of a layer runs, in us since the last task of the layer before stored its results: medians over
    layers.

    `ready_us` is when the median task has its inputs, `stored_us` when it has stored its results, and `last_us` when
    all of the operation's `tasks` in a layer have.
    """

    operation: str
    tasks: int
    ready_us: float
    stored_us: float
    last_us: float


@dataclass(frozen=True, slots=True)
class HandOffTimes:
    """The hand-offs to one operation, over all layers. `after` are the operations that signal its counters.

    `waited` of its `tasks` began to wait before the last signal. `median_us` and `max_us` are their times from that
    signal to the start; None if no task waited. `sm_held_us` and `sm_hand_off_us` are an SM's mean time waiting before
    the last signal and after it.
    """

    operation: str
    after: tuple[str, ...]
    tasks: int
    waited: int
    median_us: float | None
    max_us: float | None
    sm_held_us: float
    sm_hand_off_us: float


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """The all-reduces of one operation, over all GPUs and layers: the time from the last stored partial sum to the
    result. `sums` times `mean_us` is what they take in all."""

    operation: str
    sums: int
    median_us: float
    mean_us: float
    max_us: float


def exchange_times(trace: LaunchTrace) -> list[ExchangeTimes]:
    """How long GPUs that share a program wait for each other's results, in the order of the program's operations."""
    grouped: dict[str, list[float]] = {}
    for each in sorted(trace.exchanges, key=lambda each: each.task.task.id):
        grouped.setdefault(operation(each.task.task.label), []).append(each.exposed_us)
    return [ExchangeTimes(name, len(times), median(times), mean(times), max(times)) for name, times in grouped.items()]


def measured(program: MegakernelProgram, trace: LaunchTrace) -> TracedTimeline:
    """A launch of `program`.

    How long matrix warps starved is known of the launch, not of a task: the same share of each phase MULTIPLY is taken
    for starving.
    """
    phases = [phase for each in trace.tasks for phase in each.phases if phase.phase is Phase.MULTIPLY]
    multiplied = sum(phase.end_us - phase.start_us for phase in phases)
    starved = trace.starved * trace.span_us * trace.sms
    fed = max(0.0, 1.0 - starved / multiplied) if multiplied else 0.0
    return TracedTimeline(program, tuple(_span(each, fed) for each in trace.tasks), trace.sms)


def _span(traced: TracedTask, fed: float) -> TaskSpan:
    """A task whose matrix warps had weights for the share `fed` of the phase MULTIPLY."""
    took = dict.fromkeys(Phase, 0.0) | {phase: end - start for phase, start, end in traced.phases}
    other = took[Phase.FINISH] + took[Phase.RUN] + took[Phase.SIGNAL]
    return TaskSpan(
        traced.task.id, traced.sm, traced.current_us, traced.ready_us, traced.done_us,
        took[Phase.STAGE], took[Phase.MULTIPLY] * fed, other,
    )  # fmt: skip


def operation_times(trace: LaunchTrace) -> list[OperationTimes]:
    """The operations' times, longest first."""
    found = [_times(name, tasks, trace.sms) for name, tasks in _by_operation(trace.tasks).items()]
    return sorted(found, key=lambda each: (-each.sm_us, each.operation))


def idle_us(trace: LaunchTrace) -> float:
    """An SM's mean time outside tasks, from the launch's first time stamp to its last."""
    return trace.span_us - sum(each.done_us - each.current_us for each in trace.tasks) / trace.sms


def layer_times(trace: LaunchTrace) -> list[LayerTimes]:
    """The operations of a layer, first ready first. Empty for a launch without two layers in succession."""
    layers: dict[int, dict[str, list[TracedTask]]] = {}
    for traced in trace.tasks:
        number = layer_number(traced.task.label)
        if number is not None:
            layers.setdefault(number, {}).setdefault(operation(traced.task.label), []).append(traced)
    ends = {number: max(stored for tasks in layers[number].values() for stored in _stored(tasks)) for number in layers}
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for number, operations in layers.items():
        begin = ends.get(number - 1)
        if begin is not None:
            for name, tasks in operations.items():
                stored = _stored(tasks)
                ready = median(traced.ready_us for traced in tasks)
                row = (len(tasks), ready - begin, median(stored) - begin, max(stored) - begin)
                found.setdefault(name, []).append(row)
    rows = [
        LayerTimes(name, round(median(tasks)), median(ready), median(stored), median(last))
        for name, each in found.items()
        for tasks, ready, stored, last in [zip(*each, strict=True)]
    ]
    return sorted(rows, key=lambda row: row.ready_us)


def hand_off_times(trace: LaunchTrace) -> list[HandOffTimes]:
    """The hand-offs, in the order of the program's operations."""
    names: dict[int, dict[str, None]] = {}
    for traced in sorted(trace.tasks, key=lambda traced: traced.task.id):
        names.setdefault(traced.task.out_counter, {})[operation(traced.task.label)] = None
    grouped: dict[str, list[HandOff]] = {}
    for found in sorted(hand_offs(trace), key=lambda found: found.task.task.id):
        grouped.setdefault(operation(found.task.task.label), []).append(found)
    return [_hand_offs(name, together, names, trace.sms) for name, together in grouped.items()]


def _stored(tasks: Iterable[TracedTask]) -> list[float]:
    return [traced.stored_us for traced in tasks]


def _by_operation(tasks: Iterable[TracedTask]) -> dict[str, list[TracedTask]]:
    grouped: dict[str, list[TracedTask]] = {}
    for traced in tasks:
        grouped.setdefault(operation(traced.task.label), []).append(traced)
    return grouped


def _times(name: str, tasks: Sequence[TracedTask], sms: int) -> OperationTimes:
    phases = dict.fromkeys(Phase, 0.0)
    for traced in tasks:
        for phase, start, end in traced.phases:
            phases[phase] += (end - start) / sms
    busy = _covered((traced.ready_us, traced.phases[-1].start_us) for traced in tasks)
    total = sum(traced.done_us - traced.current_us for traced in tasks) / sms
    return OperationTimes(name, len(tasks), sum(traced.task.est_bytes for traced in tasks), total, phases, busy)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def _hand_offs(name: str, found: Sequence[HandOff], names: Mapping[int, Iterable[str]], sms: int) -> HandOffTimes:
    after = {each: None for one in found for wait in one.task.task.waits for each in names.get(wait.counter, ())}
    waited = [each for each in found if each.waited]
    latencies = [each.latency_us for each in waited]
    return HandOffTimes(
        operation=name,
        after=tuple(after),
        tasks=len(found),
        waited=len(waited),
        median_us=median(latencies) if latencies else None,
        max_us=max(latencies, default=None),
        sm_held_us=sum(each.held_us for each in waited) / sms,
        sm_hand_off_us=sum(latencies) / sms,
    )
