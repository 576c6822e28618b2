"""The prediction of one rank's iteration, and where its workers wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flywheel.interop.mpk.graph import FIRST_TASK, MpkGraph, place_of
from flywheel.interop.mpk.joint import counter_of, nodes_of
from flywheel.interop.mpk.kinds import PUTS, kind_name
from flywheel.interop.mpk.timing import H200, Runtime, Timing, walk_queues


@dataclass(frozen=True, slots=True)
class Share:
    """All tasks of a type: how long workers waited in front of them, and how long the tasks took, in us."""

    name: str
    tasks: int
    nbytes: int
    waited_us: float
    ran_us: float


def predict_step(graph: MpkGraph, runtime: Runtime = H200, context: int = 512, workers: int | None = None) -> Timing:
    """What an iteration of a graph that passed the proof for so many workers, those of `runtime` unless said otherwise,
    takes. Other ranks are taken to be as far as this one: what they signal comes when this one signals them."""
    nodes = [
        replace(node, out_counter=counter_of(graph.rank, place_of(graph.tasks[node.place].trigger)))
        if graph.tasks[node.place].kind in PUTS
        else node
        for node in nodes_of(graph, workers or runtime.workers)
    ]
    return walk_queues(graph, nodes, runtime, context)


def unqueued_us(graph: MpkGraph, runtime: Runtime = H200, context: int = 512) -> float:
    """What the step would take with a worker for every task, where no task stands behind another: about what the best
    order and placement of the same tasks and events could reach."""
    return predict_step(graph, runtime, context, len(graph.tasks)).latency_us


def shares(graph: MpkGraph, timing: Timing) -> Sequence[Share]:
    """Where the workers' time goes, by type of task, the longest first."""
    tally: dict[str, list[float]] = {}
    for span in timing.spans:
        each = tally.setdefault(kind_name(graph.tasks[span.node + FIRST_TASK].kind), [0, 0.0, 0.0, 0.0])
        each[0] += 1
        each[1] += timing.nbytes_of[span.node]
        each[2] += span.met_us - span.ready_us
        each[3] += span.done_us - span.met_us
    found = [Share(name, int(n), int(nbytes), waited, ran) for name, (n, nbytes, waited, ran) in tally.items()]
    return sorted(found, key=lambda share: (-share.waited_us - share.ran_us, share.name))
