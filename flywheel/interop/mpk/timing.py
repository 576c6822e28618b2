"""What an iteration should take: MPK's workers walk their queues, and share the memory's bandwidth.

A worker takes the tasks of its queue in order. It waits until a task's event is met, fills the task's pipeline, streams
what the task reads from memory, and signals. Nothing of a task is loaded before its event is met.

Source of the constants: docs/mpk.md, "What a step should take".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final

from flywheel.interop.mpk.graph import FIRST_TASK, ITEM_BYTES, MpkGraph, MpkTask, Tensor
from flywheel.interop.mpk.joint import Node
from flywheel.interop.mpk.kinds import KINDS, Cost
from flywheel.interop.mpk.regions import runs_of


@dataclass(frozen=True, slots=True)
class Runtime:
    """Constants of MPK's runtime on one GPU; rates are GB/s, times us."""

    name: str
    workers: int
    """Blocks that run tasks; the other SMs have the schedulers."""
    memory_gbs: float
    """What all workers together stream."""
    worker_gbs: float
    """What one worker streams alone: its kernels have few loads under way."""
    task_us: float
    """From the end of a task until its worker looks at the event of the next one."""
    event_us: float
    """From the last signal of an event until those who wait for it go on."""
    fill_us: Mapping[Cost, float]
    """What a task of a class takes besides its bytes: filling its pipeline, barriers, writing its outputs."""
    token_us: float
    """Of attention, for each token that it attends to."""
    launch_us: float
    """Between iterations: the end of one, the host's batch on the scheduler, and the begin of the next."""


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
    launch_us=8.0,
)
"""An H200; see docs/mpk.md for what its constants were fitted to."""


@dataclass(frozen=True, slots=True)
class Span:
    """A task on a worker, in us: it is looked at, its event is met, and it is done; `node` is its position."""

    node: int
    worker: int
    ready_us: float
    met_us: float
    done_us: float


@dataclass(frozen=True, slots=True)
class Timing:
    """An iteration: how long it takes, what its bytes alone would take, and each task's span in the order in which they
    end. `nbytes_of` are the bytes that each node streams."""

    latency_us: float
    floor_us: float
    spans: Sequence[Span]
    nbytes_of: Sequence[int]


def streamed_bytes(graph: MpkGraph, context: int) -> list[int]:
    """Bytes that each task of a graph streams from memory: weights and caches. What tasks write comes from L2.

    Of a cache they are the rows of `context` tokens, of an embedding those of the tokens that it looks up.
    """
    written = {tensor.name for task in graph.tasks for tensor in task.outputs}
    return [_streamed(task, context, written) for task in graph.tasks[FIRST_TASK:]]


def _streamed(task: MpkTask, context: int, written: Set[str]) -> int:
    kind = KINDS.get(task.kind)
    if kind is not None and kind.cost is Cost.EMBEDDING:
        return sum(map(_nbytes, task.outputs))
    if kind is not None and kind.cost is Cost.ATTENTION:
        caches = [task.inputs[place] for place in kind.hidden if place < len(task.inputs)]
        return sum(tensor.dims[-1] * tensor.item_bytes * context for tensor in caches if tensor.dims)
    return sum(_nbytes(tensor) for tensor in task.inputs if tensor.name not in written)


def _nbytes(tensor: Tensor) -> int:
    return sum(width * count for _, width, _, count in runs_of(tensor)) if tensor.data_type in ITEM_BYTES else 0


def walk_queues(graph: MpkGraph, nodes: Sequence[Node], runtime: Runtime, context: int) -> Timing:
    """The timeline of one iteration of one rank, whose nodes have passed the proof for `runtime.workers`.

    `context` is the number of tokens that attention attends to.
    """
    walk = _Walk(graph, nodes, runtime, context)
    latency_us = walk.run() + runtime.launch_us
    return Timing(latency_us, sum(walk.nbytes) / runtime.memory_gbs / 1e3, walk.spans, walk.nbytes)


class _Walk:
    """Workers in discrete events. Those who stream share the bandwidth evenly, so one odometer counts all bytes: a
    stream that begins at b and has n bytes ends where the odometer shows b + n."""

    def __init__(self, graph: MpkGraph, nodes: Sequence[Node], runtime: Runtime, context: int) -> None:
        self._nodes, self._runtime = nodes, runtime
        tasks = graph.tasks[FIRST_TASK:]
        self.nbytes = streamed_bytes(graph, context)
        costs = [KINDS[task.kind].cost if task.kind in KINDS else Cost.OTHER for task in tasks]
        per_token = {cost: runtime.token_us * context if cost is Cost.ATTENTION else 0.0 for cost in Cost}
        self._fill_us = [runtime.fill_us[cost] + per_token[cost] for cost in costs]
        self._queues: dict[int, list[int]] = {}
        for index, node in enumerate(nodes):
            self._queues.setdefault(node.sm or 0, []).append(index)
        self._next = dict.fromkeys(self._queues, 0)
        self._left: dict[int, int] = {}
        for node in nodes:
            self._left[node.out_counter] = self._left.get(node.out_counter, 0) + 1
        self._met: dict[int, float] = {}
        self._blocked: dict[int, list[tuple[int, float]]] = {}
        self._agenda: list[tuple[float, int, int]] = []  # (time, node, worker): a stream begins
        self._streams: list[tuple[float, int, int]] = []  # (odometer at the end, node, worker)
        self._odometer = self._now = 0.0
        self._looked: dict[int, tuple[float, float]] = {}
        self.spans: list[Span] = []

    def run(self) -> float:
        """Time at which the last task is done."""
        for worker in self._queues:
            self._look(worker, 0.0)
        while self._agenda or self._streams:
            end_us = self._stream_end()
            if self._agenda and (end_us is None or self._agenda[0][0] <= end_us):
                at_us, index, worker = heappop(self._agenda)
                self._advance(at_us)
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

    def _look(self, worker: int, ready_us: float) -> None:
        """The worker looks at the next task of its queue."""
        queue, place = self._queues[worker], self._next[worker]
        if place == len(queue):
            return
        self._next[worker] = place + 1
        index = queue[place]
        missing = next((wait.counter for wait in self._nodes[index].waits if wait.counter not in self._met), None)
        if missing is None:
            met = [self._met[wait.counter] for wait in self._nodes[index].waits]
            self._begin(index, worker, ready_us, max([ready_us, *met]))
        else:
            self._blocked.setdefault(missing, []).append((index, ready_us))

    def _begin(self, index: int, worker: int, ready_us: float, met_us: float) -> None:
        self._looked[index] = ready_us, met_us
        heappush(self._agenda, (met_us + self._fill_us[index], index, worker))

    def _finish(self, index: int, worker: int) -> None:
        ready_us, met_us = self._looked.pop(index)
        self.spans.append(Span(index, worker, ready_us, met_us, self._now))
        counter = self._nodes[index].out_counter
        self._left[counter] -= 1
        if not self._left[counter]:
            self._met[counter] = met = self._now + self._runtime.event_us
            for other, waited_us in self._blocked.pop(counter, []):
                missing = next((w.counter for w in self._nodes[other].waits if w.counter not in self._met), None)
                if missing is None:
                    self._begin(other, self._nodes[other].sm or 0, waited_us, max(waited_us, met))
                else:
                    self._blocked.setdefault(missing, []).append((other, waited_us))
        self._look(worker, self._now + self._runtime.task_us)
