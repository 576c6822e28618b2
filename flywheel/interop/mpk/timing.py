"""A model of the time of an iteration: MPK's workers walk their queues and share the bandwidth of memory.

A worker takes the tasks of its queue in order. It waits until a task's event is met, fills the task's pipeline, streams
what the task reads from memory, and signals. It loads nothing of a task before the task's event is met. When an event
launches tasks, schedulers deal them into the workers' queues in turn. `predict_step` says how long one rank's iteration
takes, and where its workers wait.

Source of the constants: docs/mpk.md, "What a step should take".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Final

from flywheel.interop.mpk.graph import (
    FIRST_TASK,
    INVALID,
    ITEM_BYTES,
    LAUNCH,
    LAUNCH_MASSIVE,
    MpkGraph,
    MpkTask,
    MpkTensor,
    place_of,
)
from flywheel.interop.mpk.joint import JointTask, counter_of, nodes_of
from flywheel.interop.mpk.kinds import KINDS, PUTS, Cost, kind_name
from flywheel.interop.mpk.regions import runs_of
from flywheel.ir.firing import fire


@dataclass(frozen=True, slots=True)
class Runtime:
    """Constants of MPK's runtime on one GPU; rates are GB/s, times us."""

    name: str
    workers: int
    """Blocks that run tasks; the other SMs have the schedulers."""
    memory_gbs: float
    """The bandwidth of all workers together."""
    worker_gbs: float
    """The bandwidth of one worker alone: its kernels have few loads under way."""
    task_us: float
    """From the end of a task until its worker looks at the event of the next one."""
    event_us: float
    """From the last signal of an event until the tasks that wait for it go on."""
    fill_us: Mapping[Cost, float]
    """The time of a task beside its bytes, by class: filling its pipeline, barriers, writing its outputs."""
    token_us: float
    """The time that attention takes for each token that it attends to."""
    sms: int
    """SMs of the GPU; those without a worker have four schedulers each, if there are any."""
    launch_us: float
    """Between iterations: the end of one, the host's batch on the scheduler, and the begin of the next."""
    schedulers: int
    """Warps that launch tasks just in time, each for its share of the workers."""
    schedule_us: float
    """From the last signal of an event that launches tasks until its first task is in a queue and found there."""
    dispatch_us: float
    """The time that a scheduler takes for each further task."""

    def with_workers(self, workers: int) -> Runtime:
        """The runtime with another number of workers, which schedulers make room for as far as there are SMs."""
        left = self.sms - workers
        return replace(self, workers=workers, schedulers=4 * left if left > 0 else self.schedulers)


H200: Final = Runtime(
    name="h200",
    workers=128,
    memory_gbs=4300.0,
    worker_gbs=50.0,
    task_us=1.5,
    event_us=2.0,
    fill_us=MappingProxyType(
        {
            Cost.OTHER: 1.5,
            Cost.EMBEDDING: 1.5,
            Cost.NORM: 2.0,
            Cost.PRODUCT: 2.0,
            Cost.EXPERTS: 2.0,
            Cost.ATTENTION: 3.0,
            Cost.REMOTE: 4.0,
        }
    ),
    token_us=0.012,
    sms=132,
    launch_us=8.0,
    schedulers=16,
    schedule_us=4.0,
    dispatch_us=0.5,
)
"""An H200. docs/mpk.md says which measurements its constants were fitted to."""


_JUST_IN_TIME: Final = (LAUNCH, LAUNCH_MASSIVE)


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """A task on a worker: the times, in us, at which the worker looks at it, its event is met, its pipeline is filled
    and it streams its bytes, and it is done. `node` is its position."""

    node: int
    worker: int
    ready_us: float
    met_us: float
    filled_us: float
    done_us: float


@dataclass(frozen=True, slots=True)
class Timing:
    """An iteration: its time, the time for its bytes alone, and the spans of its tasks in the order in which they end.
    `nbytes_of` are the bytes that each node streams."""

    latency_us: float
    floor_us: float
    spans: Sequence[WorkerSpan]
    nbytes_of: Sequence[int]


def streamed_bytes(graph: MpkGraph, context: int) -> list[int]:
    """The bytes that each task of a graph streams from memory: weights and caches. Activations come from L2 and do not
    count.

    Of a cache, the rows of `context` tokens count; of an embedding, the rows of the tokens that it looks up.
    """
    written = {tensor.name for task in graph.tasks for tensor in task.outputs}
    return [_streamed(task, context, written) for task in graph.tasks[FIRST_TASK:]]


def fill_times(graph: MpkGraph, runtime: Runtime, context: int) -> list[float]:
    """The time that each task of a graph takes beside its bytes, in us."""
    costs = [KINDS[task.kind].cost if task.kind in KINDS else Cost.OTHER for task in graph.tasks[FIRST_TASK:]]
    per_token = {cost: runtime.token_us * context if cost is Cost.ATTENTION else 0.0 for cost in Cost}
    return [runtime.fill_us[cost] + per_token[cost] for cost in costs]


def _streamed(task: MpkTask, context: int, written: Set[str]) -> int:
    kind = KINDS.get(task.kind)
    if kind is not None and kind.cost is Cost.EMBEDDING:
        return sum(map(_nbytes, task.outputs))
    if kind is not None and kind.cost is Cost.ATTENTION:
        caches = [task.inputs[place] for place in kind.hidden if place < len(task.inputs)]
        return sum(tensor.dims[-1] * tensor.item_bytes * context for tensor in caches if tensor.dims)
    return sum(_nbytes(tensor) for tensor in task.inputs if tensor.name not in written)


def _nbytes(tensor: MpkTensor) -> int:
    return sum(width * count for _, width, _, count in runs_of(tensor)) if tensor.data_type in ITEM_BYTES else 0


def walk_queues(graph: MpkGraph, nodes: Sequence[JointTask], runtime: Runtime, context: int) -> Timing:
    """The timeline of one iteration of one rank. Its nodes stand in the queues of `runtime.workers` workers and have
    passed the proof for that number.

    `context` is the number of tokens that attention attends to.
    """
    walk = _Walk(graph, nodes, runtime, context)
    latency_us = walk.run() + runtime.launch_us
    return Timing(latency_us, sum(walk.nbytes) / runtime.memory_gbs / 1e3, walk.spans, walk.nbytes)


class _Walk:
    """Simulates workers by discrete events. Workers that stream share the bandwidth evenly, so one odometer counts the
    bytes of a stream: a stream of n bytes that begins when the odometer shows b ends when it shows b + n."""

    def __init__(self, graph: MpkGraph, nodes: Sequence[JointTask], runtime: Runtime, context: int) -> None:
        self._nodes, self._runtime = nodes, runtime
        self.nbytes = streamed_bytes(graph, context)
        self._fill_us = fill_times(graph, runtime, context)
        self._first_queue = graph.rank * runtime.workers
        self._queues: list[list[int]] = [[] for _ in range(runtime.workers)]
        for index, node in enumerate(nodes):
            if node.sm is not None:
                self._queues[node.sm - self._first_queue].append(index)
        self._next = [0] * runtime.workers
        self._idle: dict[int, float] = {}
        self._late = _Dispatch(graph, runtime)
        self._left: dict[int, int] = {}
        for node in nodes:
            self._left[node.out_counter] = self._left.get(node.out_counter, 0) + 1
        self._met: dict[int, float] = {}
        self._blocked: dict[int, list[tuple[int, int, float]]] = {}
        self._agenda: list[tuple[float, int, int, bool]] = []  # (time, node, worker, it is there): a stream begins
        self._streams: list[tuple[float, int, int]] = []  # (odometer at the end, node, worker)
        self._odometer = self._now = 0.0
        self._looked: dict[int, tuple[float, float]] = {}
        self.spans: list[WorkerSpan] = []

    def run(self) -> float:
        """Time at which the last task is done."""
        for worker in range(len(self._queues)):
            self._look(worker, 0.0)
        while self._agenda or self._streams:
            end_us = self._stream_end()
            if self._agenda and (end_us is None or self._agenda[0][0] <= end_us):
                at_us, index, worker, launched = heappop(self._agenda)
                self._advance(at_us)
                if launched:
                    self._arrive(index, worker)
                else:
                    heappush(self._streams, (self._odometer + self.nbytes[index], index, worker))
            else:
                assert end_us is not None
                self._advance(end_us)
                _, index, worker = heappop(self._streams)
                self._finish(index, worker)
        return self._now

    def _rate(self) -> float:
        """Bytes per us of each stream."""
        return min(self._runtime.worker_gbs, self._runtime.memory_gbs / max(1, len(self._streams))) * 1e3

    def _stream_end(self) -> float | None:
        if not self._streams:
            return None
        return self._now + max(0.0, self._streams[0][0] - self._odometer) / self._rate()

    def _advance(self, at_us: float) -> None:
        self._odometer += (at_us - self._now) * self._rate()
        self._now = at_us

    def _arrive(self, index: int, worker: int) -> None:
        """A task that was launched just in time is in a queue."""
        self._queues[worker].append(index)
        since_us = self._idle.pop(worker, None)
        if since_us is not None:
            self._look(worker, max(since_us, self._now))

    def _look(self, worker: int, ready_us: float) -> None:
        """The worker looks at the next task of its queue."""
        queue, place = self._queues[worker], self._next[worker]
        if place == len(queue):
            self._idle[worker] = ready_us
            return
        self._next[worker] = place + 1
        self._await(queue[place], worker, ready_us)

    def _await(self, index: int, worker: int, ready_us: float) -> None:
        met_us = ready_us
        for wait in self._nodes[index].waits:
            if wait.counter not in self._met:
                self._blocked.setdefault(wait.counter, []).append((index, worker, ready_us))
                return
            met_us = max(met_us, self._met[wait.counter])
        self._looked[index] = ready_us, met_us
        heappush(self._agenda, (met_us + self._fill_us[index], index, worker, False))

    def _finish(self, index: int, worker: int) -> None:
        ready_us, met_us = self._looked.pop(index)
        self.spans.append(WorkerSpan(index, worker, ready_us, met_us, met_us + self._fill_us[index], self._now))
        counter = self._nodes[index].out_counter
        self._left[counter] -= 1
        if not self._left[counter]:
            self._met[counter] = self._now + self._runtime.event_us
            for other, at, since_us in self._blocked.pop(counter, []):
                self._await(other, at, since_us)
            for at_us, other, at in self._late.launch(counter, worker, self._now):
                heappush(self._agenda, (at_us, other, at, True))
        self._look(worker, self._now + self._runtime.task_us)


class _Dispatch:
    """Chooses the workers of the tasks that an event launches. Each scheduler deals to its own workers in turn. The
    scheduler of the worker that met a LAUNCH_TASKS launches all of its tasks; of a LAUNCH_MASSIVE_TASKS, every
    scheduler launches a share."""

    def __init__(self, graph: MpkGraph, runtime: Runtime) -> None:
        self._runtime, self._last = runtime, len(graph.tasks)
        launching = [(number, event) for number, event in enumerate(graph.events) if event.kind in _JUST_IN_TIME]
        self._events = {counter_of(graph.rank, number): event for number, event in launching}
        self._count = max(1, min(runtime.schedulers, runtime.workers))
        ends = [place * runtime.workers // self._count for place in range(self._count + 1)]
        self._workers = [range(first, last) for first, last in pairwise(ends)]
        self._turn = [0] * self._count

    def launch(self, counter: int, worker: int, at_us: float) -> list[tuple[float, int, int]]:
        """(time, node, worker) of each task that an event launches when a task of `worker` meets it."""
        event = self._events.get(counter)
        if event is None:
            return []
        first = max(event.first, FIRST_TASK) - FIRST_TASK
        count = max(0, min(event.last, self._last) - FIRST_TASK - first)
        if event.kind == LAUNCH:
            own = next(number for number, workers in enumerate(self._workers) if worker in workers)
            shares = [(own, range(first, first + count))]
        else:
            ends = [first + place * count // self._count for place in range(self._count + 1)]
            shares = list(enumerate(range(start, end) for start, end in pairwise(ends)))
        return [
            (at_us + self._runtime.schedule_us + step * self._runtime.dispatch_us, index, self._deal(scheduler))
            for scheduler, indices in shares
            for step, index in enumerate(indices)
        ]

    def _deal(self, scheduler: int) -> int:
        workers = self._workers[scheduler]
        turn = self._turn[scheduler]
        self._turn[scheduler] = turn + 1
        return workers[turn % len(workers)]


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
