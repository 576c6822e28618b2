"""Predicts a program's latency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from flywheel.cost_model.links import exchanges_us
from flywheel.cost_model.machine import Machine, machine_for
from flywheel.cost_model.spans import TaskSpan
from flywheel.errors import InvalidProgramError
from flywheel.ir import MegakernelProgram
from flywheel.ir.alone import alone
from flywheel.measure.floor import floor_us, weight_bytes_read

if TYPE_CHECKING:
    from flywheel.cost_model.demand import Demand
    from flywheel.cost_model.engine import Trace

MODEL_VERSION: Final = "11"
"""The version changes whenever the same program may get another prediction."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time of one launch, and the least time in which its weights can be read."""

    latency_us: float
    floor_us: float


def predict(program: MegakernelProgram, machine: Machine | None = None) -> Prediction:
    """The latency of one launch of a valid `program` on its target. `machine` replaces the target's constants.

    For several GPUs, it is the latency of the slowest GPU and the exchanges' time. Raises ConfigError for a program
    without a target. Raises InvalidProgramError for a program without SM assignment, for one that cannot finish, and
    for one of several GPUs as `rank_plans`.
    """
    latency, floor = max([_predicted(*each, machine) for each in _parts(program)], key=_first)
    return Prediction(latency if program.ranks == 1 else latency + _exchanges_us(program, machine), floor)


def predict_us(program: MegakernelProgram, machine: Machine | None = None) -> float:
    """Only the latency of `predict`, for searches. Raises as `predict`."""
    return predict(program, machine).latency_us


def timeline(program: MegakernelProgram, machine: Machine | None = None) -> list[TaskSpan]:
    """The spans of all tasks, SM by SM in queue order.

    For several GPUs, it has all tasks except pushes, GPU by GPU, with consecutive SM numbers. Raises as `predict`.
    """
    if program.ranks == 1:
        return [span for each in _parts(program) for span in _spans(*each, machine)]
    return [span for rank, each in enumerate(_parts(program)) for span in _spans_of(program, rank, *each, machine)]


def _parts(program: MegakernelProgram) -> Iterator[tuple[MegakernelProgram, Demand]]:
    """The program of each GPU and its demand."""
    # Imported here, so that only predictions wait for numpy and numba.
    from flywheel.cost_model.demand import demand_of, part_demand

    if program.ranks == 1:
        yield program, demand_of(program)
        return
    for rank in range(program.ranks):
        part = alone(program, rank)
        yield part, part_demand(program, rank, part)


def _predicted(program: MegakernelProgram, demand: Demand, machine: Machine | None) -> tuple[float, float]:
    """(latency, floor) of the program of one GPU."""
    machine, trace = _run(program, demand, machine)
    floor = _floor_us(program)
    return _latency_us(trace, machine, floor), floor


def _first(found: tuple[float, float]) -> float:
    return found[0]


def _spans(program: MegakernelProgram, demand: Demand, machine: Machine | None) -> list[TaskSpan]:
    from flywheel.cost_model.queues import priced_work

    machine, trace = _run(program, demand, machine)
    sms = [sm for sm, (first, end) in enumerate(pairwise(demand.first)) for _ in range(first, end)]
    rows = zip(
        demand.task_ids.tolist(), sms, trace.start_us.tolist(), trace.end_us.tolist(),
        *(column.tolist() for column in priced_work(demand, machine)), strict=True,
    )  # fmt: skip
    spans: list[TaskSpan] = []
    for task, sm, start, end, *parts in rows:
        came = spans[-1].end_us if spans and spans[-1].sm == sm else 0.0
        spans.append(TaskSpan(task, sm, came, start, end, *parts))
    return spans


def _exchanges_us(program: MegakernelProgram, machine: Machine | None) -> float:
    assert program.target is not None
    return exchanges_us(program, (machine or machine_for(program.target)).assumed_link)


def _spans_of(
    program: MegakernelProgram, rank: int, part: MegakernelProgram, demand: Demand, machine: Machine | None
) -> Iterator[TaskSpan]:
    assert program.target is not None
    homes = {buffer.id: buffer.rank for buffer in program.buffers}
    own = [
        task.id
        for task in program.tasks
        if task.rank == rank and all(homes[number] == rank for number in task.outputs)
    ]
    first = rank * program.target.num_sms
    for span in _spans(part, demand, machine):
        yield replace(span, task=own[span.task], sm=first + span.sm)


def latency_us(demand: Demand, machine: Machine, floor: float) -> float:
    """The latency in us that `predict` returns for a program with this `demand` and `floor`. Raises InvalidProgramError
    as `predict`."""
    trace = _simulate(demand, machine)
    if trace.stuck is not None:
        raise _never_starts(f"task {demand.task_ids[trace.stuck]}")
    return _latency_us(trace, machine, floor)


def _floor_us(program: MegakernelProgram) -> float:
    assert program.target is not None
    return floor_us(weight_bytes_read(program), program.target)


def _latency_us(trace: Trace, machine: Machine, floor: float) -> float:
    return max(floor, machine.launch_us + max(trace.finish_us))


def _run(program: MegakernelProgram, demand: Demand, machine: Machine | None) -> tuple[Machine, Trace]:
    assert program.target is not None
    machine = machine or machine_for(program.target)
    trace = _simulate(demand, machine)
    if trace.stuck is not None:
        task = next(task for task in program.tasks if task.id == demand.task_ids[trace.stuck])
        raise _never_starts(f"task {task.id} ({task.label})")
    return machine, trace


def _simulate(demand: Demand, machine: Machine) -> Trace:
    from flywheel.cost_model.engine import Rates, simulate
    from flywheel.cost_model.queues import priced

    variant = demand.variant
    rates = Rates(
        total=machine.read_gbs * 1e3,
        loader=machine.loader_rate(variant),
        poll_us=machine.poll_us,
        restart_us=machine.restart_us(variant),
        crowd_us=machine.crowd_us,
    )
    return simulate(priced(demand, machine), rates)


def _never_starts(task: str) -> InvalidProgramError:
    return InvalidProgramError(f"{task}: never starts, its counters stay incomplete")
