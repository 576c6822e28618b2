"""The prediction of one rank's iteration, and where its workers wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from flywheel.interop.mpk.graph import FIRST_TASK, INVALID, MpkGraph, place_of
from flywheel.interop.mpk.joint import JointTask, counter_of, nodes_of
from flywheel.interop.mpk.kinds import PUTS, kind_name
from flywheel.interop.mpk.timing import H200, Runtime, Timing, fill_times, walk_queues
from flywheel.ir.firing import fire


@dataclass(frozen=True, slots=True)
class TypeTime:
    """All tasks of a type: how long workers waited in front of them, and how long the tasks took, in us."""

    name: str
    tasks: int
    nbytes: int
    waited_us: float
    ran_us: float


def predict_step(graph: MpkGraph, runtime: Runtime = H200, context: int = 512, workers: int | None = None) -> Timing:
    """Predict one iteration of a graph of one rank, in us. The graph must have passed the proof for that many workers.

    Without a number, the workers are those of `runtime`. The prediction assumes that all ranks advance together: a
    signal from another rank comes when this rank sends its own.
    """
    nodes = as_far(graph, workers or runtime.workers)
    return walk_queues(graph, nodes, runtime.with_workers(workers or runtime.workers), context)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of an iteration, in us, which hold for every order and every placement of tasks: the longest path
    through the tasks, each alone on the GPU; the work of one worker if all workers share the work evenly; and the time
    for the bytes alone. `unqueued` is no bound: it is the predicted time with one worker for each task."""

    path_us: float
    load_us: float
    floor_us: float
    unqueued_us: float


def bounds_of(graph: MpkGraph, runtime: Runtime = H200, context: int = 512) -> Bounds:
    """The bounds of an iteration of a graph that passed the proof."""
    free = predict_step(graph, runtime, context, len(graph.tasks))
    nodes, fill_us = as_far(graph, 1), fill_times(graph, runtime, context)
    done_us: dict[int, float] = {}
    for index in fire(nodes):
        begin_us = max([done_us[wait.counter] + runtime.event_us for wait in nodes[index].waits], default=0.0)
        end_us = begin_us + fill_us[index] + free.nbytes_of[index] / runtime.worker_gbs / 1e3
        counter = nodes[index].out_counter
        done_us[counter] = max(done_us.get(counter, 0.0), end_us)
    spent_us = sum(fill_us) + runtime.task_us * (len(nodes) - runtime.workers)
    load_us = max(0.0, spent_us / runtime.workers) + free.floor_us
    return Bounds(max(done_us.values(), default=0.0) + runtime.launch_us, load_us + runtime.launch_us,
                  free.floor_us, free.latency_us)  # fmt: skip


def as_far(graph: MpkGraph, workers: int) -> list[JointTask]:
    """The nodes of one rank. Its signals to other ranks stand for their signals to it, as if all advanced together."""
    return [
        replace(node, out_counter=counter_of(graph.rank, place_of(graph.tasks[node.place].trigger)))
        if graph.tasks[node.place].kind in PUTS
        else node
        for node in nodes_of(graph, workers)
    ]


def shares(graph: MpkGraph, timing: Timing) -> Sequence[TypeTime]:
    """Where the workers' time goes, by type of task, the longest first."""
    tally: dict[str, list[float]] = {}
    for span in timing.spans:
        each = tally.setdefault(kind_name(graph.tasks[span.node + FIRST_TASK].kind), [0, 0.0, 0.0, 0.0])
        each[0] += 1
        each[1] += timing.nbytes_of[span.node]
        each[2] += span.met_us - span.ready_us
        each[3] += span.done_us - span.met_us
    found = [TypeTime(name, int(n), int(nbytes), waited, ran) for name, (n, nbytes, waited, ran) in tally.items()]
    return sorted(found, key=lambda share: (-share.waited_us - share.ran_us, share.name))


@dataclass(frozen=True, slots=True)
class TypeWait:
    """How long workers waited for the tasks of a type: the number of tasks whose event was not met yet, and the waits
    in us, None if no worker waited."""

    name: str
    after: Sequence[str]
    tasks: int
    waited: int
    median_us: float | None
    max_us: float | None


def hand_offs(graph: MpkGraph, timing: Timing) -> Sequence[TypeWait]:
    """The hand-offs of each type of task, in the order of the list."""
    signalling: dict[int, dict[str, None]] = {}
    for task in graph.tasks[FIRST_TASK:]:
        if task.trigger != INVALID:
            signalling.setdefault(place_of(task.trigger), {})[kind_name(task.kind)] = None
    waits: dict[str, list[float]] = {}
    after: dict[str, dict[str, None]] = {}
    for span in sorted(timing.spans, key=lambda span: span.node):
        task = graph.tasks[span.node + FIRST_TASK]
        waits.setdefault(kind_name(task.kind), []).append(span.met_us - span.ready_us)
        before = {} if task.dependent == INVALID else signalling.get(place_of(task.dependent), {})
        after.setdefault(kind_name(task.kind), {}).update(before)
    found = []
    for name, times in waits.items():
        waited = [each for each in times if each > 0]
        middle, most = (median(waited), max(waited)) if waited else (None, None)
        found.append(TypeWait(name, tuple(after[name]), len(times), len(waited), middle, most))
    return found
