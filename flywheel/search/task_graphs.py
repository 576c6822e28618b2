"""Search schedules of other runtimes' task graphs: a study proposes each, which is then proved safe and predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Final

from flywheel.interop.mpk.graph import MpkGraph
from flywheel.interop.mpk.proof import check, check_queue_lengths
from flywheel.interop.mpk.rescheduling import EVENTS, LAUNCHES, ORDERS, GraphSchedule, components, launch_of, reschedule
from flywheel.interop.mpk.timing import H200, Runtime, predict_step
from flywheel.ir.validate.findings import Findings
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Dimension

DEFAULT_TRIALS: Final = 64
WORKERS: Final = (96, 104, 112, 120, 124, 126, 127, 128, 129, 130, 131)
"""Numbers of workers that are tried; one SM is left for schedulers."""


@dataclass(frozen=True, slots=True)
class TriedSchedule:
    """A schedule and the predicted latency of a step in us; where the proof rejected it, None and the `reason`."""

    schedule: GraphSchedule
    latency_us: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """All trials, the file's own schedule first; the best trial, the earliest among equals; and the best's graphs."""

    trials: Sequence[TriedSchedule]
    best: TriedSchedule
    graphs: Sequence[MpkGraph]


@dataclass(frozen=True, slots=True)
class GraphSpace:
    """The knobs of the graphs of one program. A knob that would change nothing in them has one value."""

    dimensions: tuple[Dimension, ...]

    @property
    def points(self) -> int:
        """Number of choices."""
        return prod(len(dimension.values) for dimension in self.dimensions)


def space_of(graphs: Sequence[MpkGraph], workers: Sequence[int]) -> GraphSpace:
    """The knobs of graphs that passed the proof. `workers` are the numbers of workers to search."""
    given = launch_of(graphs[0])
    launches = tuple(LAUNCHES) if len(graphs) == 1 and _launches(graphs[0]) else (given,)
    events = tuple(EVENTS) if any(components(graph) for graph in graphs) else ("given",)
    return GraphSpace(
        (
            Dimension("order", tuple(ORDERS), False),
            Dimension("events", events, False),
            Dimension("launch", launches, False),
            Dimension("workers", tuple(workers), True),
        )
    )


def _launches(graph: MpkGraph) -> bool:
    other = next(name for name in LAUNCHES if name != launch_of(graph))
    return launch_of(reschedule(graph, GraphSchedule("given", "given", other, H200.workers))) == other


def search_graphs(
    graphs: Sequence[MpkGraph],
    aliases: Mapping[str, str],
    workers: Sequence[int],
    trials: int = DEFAULT_TRIALS,
    sampler: str = "descent",
    seed: int = 0,
    context: int = 512,
    runtime: Runtime = H200,
) -> Found:
    """Search the schedules of a program's graphs, one a rank. The graphs must have passed the proof.

    Every rank gets the same schedule, and a step takes as long as its slowest rank. The first trial is the graphs' own
    schedule, with the runtime's number of workers if `workers` has it. Raises UnknownNameError and UsageError as
    make_sampler does.
    """
    space = space_of(graphs, workers)
    study = CampaignStudy(space, sampler, seed, ())
    first = runtime.workers if runtime.workers in workers else workers[0]
    study.enqueue({"order": "given", "events": "given", "launch": launch_of(graphs[0]), "workers": first})
    known: dict[GraphSchedule, TriedSchedule] = {}
    made: dict[GraphSchedule, _MadeGraphs] = {}
    for _ in range(min(trials, space.points)):
        trial, choice = study.ask()
        order, events, launch = (str(choice[part]) for part in ("order", "events", "launch"))
        schedule = GraphSchedule(order, events, launch, int(choice["workers"]))
        form = replace(schedule, workers=0)
        if form not in made:
            changed = [reschedule(graph, schedule, runtime, context) for graph in graphs]
            made[form] = _MadeGraphs(changed, check(changed, None, aliases).ok)
        if schedule not in known:
            known[schedule] = _try(made[form], schedule, aliases, runtime, context)
        study.tell(trial, known[schedule].latency_us)
    best = min(known.values(), key=lambda tried: inf if tried.latency_us is None else tried.latency_us)
    return Found(tuple(known.values()), best, made[replace(best.schedule, workers=0)].graphs)


@dataclass(frozen=True, slots=True)
class _MadeGraphs:
    """Graphs in a schedule, for any number of workers, and whether they are safe under any placement."""

    graphs: Sequence[MpkGraph]
    safe: bool


def _try(
    made: _MadeGraphs, schedule: GraphSchedule, aliases: Mapping[str, str], runtime: Runtime, context: int
) -> TriedSchedule:
    findings = Findings(strict=False)
    for error in () if made.safe else check(made.graphs, schedule.workers, aliases).errors:
        findings.error(error.code, error.message, error.task)
    check_queue_lengths(made.graphs, schedule.workers, findings)
    if findings.errors:
        return TriedSchedule(schedule, None, findings.errors[0].message)
    times = [predict_step(graph, runtime, context, schedule.workers).latency_us for graph in made.graphs]
    return TriedSchedule(schedule, max(times))
