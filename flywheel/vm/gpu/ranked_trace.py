"""The traces of all GPUs of a launch as one, by one clock, and what each sum of the GPUs' results cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from flywheel.ir import Task
from flywheel.plan.ranks import RankPart
from flywheel.vm.gpu.trace import Exchange, LaunchTrace, PhaseSpan, TracedTask
from flywheel.vm.pack import PackedProgram

_ALL: Final = 1 << 62


def join_traces(packed: Sequence[PackedProgram], traces: Sequence[LaunchTrace]) -> LaunchTrace:
    """One trace of the launches of all ranks, in order. SM s of rank r is number r * `sms` + s.

    Each GPU has a clock of its own. They are set by the data that the GPUs exchange, as if the fastest exchange took as
    long from rank 0 to a rank as back. Where two GPUs exchange nothing, their first stamps count as one time.
    """
    parts = [_part_of(each) for each in packed]
    found = [list(_exchanges(parts, traces, rank)) for rank in range(len(parts))]
    shifts = [_shift(found, rank) for rank in range(len(parts))]
    sms = traces[0].sms
    moved = [
        [_moved(traced, shifts[rank], rank * sms) for traced in trace.tasks] for rank, trace in enumerate(traces)
    ]
    first = min((traced.current_us for tasks in moved for traced in tasks), default=0.0)
    placed = [[_moved(traced, -first, 0) for traced in tasks] for tasks in moved]
    aligned = [replace(trace, tasks=tuple(tasks)) for trace, tasks in zip(traces, placed, strict=True)]
    exchanges = [
        Exchange(to, max(sources, key=lambda each: each.stored_us))
        for rank in range(len(parts))
        for to, sources in _by_sum(_exchanges(parts, aligned, rank))
    ]
    return LaunchTrace(
        tuple([traced for tasks in placed for traced in tasks]),
        sms * len(traces),
        sum(trace.stalled for trace in traces) / len(traces),
        sum(trace.starved for trace in traces) / len(traces),
        sum(trace.awaiting for trace in traces) / len(traces),
        tuple(exchanges),
    )


def _part_of(packed: PackedProgram) -> RankPart:
    assert packed.part is not None
    return packed.part


def _exchanges(
    parts: Sequence[RankPart], traces: Sequence[LaunchTrace], rank: int
) -> Iterator[tuple[int, TracedTask, TracedTask]]:
    """(rank, producer there, reader here) of each summand, of any GPU, that a task of GPU `rank` reads where it
    arrives."""
    own = parts[rank]
    makers: dict[int, list[tuple[int, TracedTask]]] = {}  # by the id of the buffer here
    for other, part in enumerate(parts):
        for traced in traces[other].tasks:
            for number in traced.task.outputs:
                here = number if other == rank else part.images.get(number, {}).get(rank)
                if here is not None:
                    makers.setdefault(here, []).append((other, traced))
    for traced in traces[rank].tasks:
        if own.arrived.isdisjoint(traced.task.inputs):
            continue
        for number in traced.task.inputs:
            for other, maker in makers.get(number, ()):
                if _overlap(maker.task, traced.task):
                    yield other, maker, traced


def _by_sum(
    exchanges: Iterator[tuple[int, TracedTask, TracedTask]],
) -> Iterator[tuple[TracedTask, list[TracedTask]]]:
    """Each reader with all its producers."""
    found: dict[int, tuple[TracedTask, list[TracedTask]]] = {}
    for _, maker, reader in exchanges:
        found.setdefault(reader.task.id, (reader, []))[1].append(maker)
    yield from found.values()


def _shift(found: Sequence[Sequence[tuple[int, TracedTask, TracedTask]]], rank: int) -> float:
    """What to add to times of a rank to get those of rank 0, in us."""
    there = [reader.stored_us - maker.stored_us for other, maker, reader in found[rank] if other == 0]
    back = [reader.stored_us - maker.stored_us for other, maker, reader in found[0] if other == rank]
    if rank == 0 or not there or not back:
        return 0.0
    return (min(back) - min(there)) / 2


def _overlap(one: Task, other: Task) -> bool:
    """Whether two tasks have columns in common; a task without named columns has all."""
    (start, stop), (begin, end) = _columns(one), _columns(other)
    return start < end and begin < stop


def _columns(task: Task) -> tuple[int, int]:
    first, count = task.params.get("n_off"), task.params.get("N_tile")
    return (first, first + count) if isinstance(first, int) and isinstance(count, int) else (0, _ALL)


def _moved(traced: TracedTask, us: float, sms: int) -> TracedTask:
    phases = tuple([PhaseSpan(phase, start + us, end + us) for phase, start, end in traced.phases])
    return replace(
        traced, sm=traced.sm + sms, current_us=traced.current_us + us, ready_us=traced.ready_us + us,
        done_us=traced.done_us + us, phases=phases,
    )  # fmt: skip
