"""The proof that a task graph is safe to launch: it ends, and its tasks read and write every cell in one fixed order.

The order and the walk are the ones of our own programs (flywheel.ir.order, firing, validate.sweep). This module gives
them the meaning of events in MPK's runtime. Source: docs/mpk.md, "What is proved".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flywheel.interop.mpk.explain import Clashes, report_clashes, tensor_at
from flywheel.interop.mpk.graph import END, INVALID, MpkGraph, is_remote
from flywheel.interop.mpk.joint import Joint, continued, counter_of, join, mirrored, n_ranks
from flywheel.interop.mpk.kinds import TILE_ALLREDUCE
from flywheel.interop.mpk.regions import grid_at
from flywheel.interop.mpk.structure import check_graph, check_joins, check_queue_lengths
from flywheel.ir.dag import find_cycle, topological_positions
from flywheel.ir.firing import fire, stuck_in_queues
from flywheel.ir.order import HappensBefore, QueueOrder
from flywheel.ir.validate.findings import Findings, ValidationResult
from flywheel.ir.validate.sweep import Clash, sweep
from flywheel.process import no_collector

MAX_RANKS: Final = 16
"""Most ranks of a program of which files are missing."""

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Races:
    """Nodes that touch a cell in no order, and (node, cell) of each read of a cell that only later tasks write. Races
    with the next iteration are listed only if this one has none."""

    joint: Joint
    before: HappensBefore
    clashes: Sequence[Clash]
    late: Sequence[tuple[int, int]]


def check(
    graphs: Sequence[MpkGraph], workers: int | None = None, aliases: Mapping[str, str] = _NO_ALIASES
) -> ValidationResult:
    """Prove the graphs of the ranks of one program safe together, or say why not. Never raises.

    Without `workers`, the verdict holds for any number of workers and any placement. With `workers`, it holds for MPK's
    queues of that many workers, and the order of a queue then orders its tasks. `aliases` maps a tensor's name to that
    of another tensor in the same memory.
    """
    findings = Findings(strict=False)
    stats = {
        "ranks": len(graphs),
        "tasks": sum(len(graph.tasks) for graph in graphs),
        "events": sum(len(graph.events) for graph in graphs),
    }
    graphs = sorted(graphs, key=lambda graph: graph.rank)
    for graph in graphs:
        if not findings.errors:
            check_graph(graph, findings)
    if len(graphs) == 1 and any(task.kind == TILE_ALLREDUCE for task in graphs[0].tasks):
        text = "no file of another rank, though its tile all-reduces need some; the file does not say how many"
        findings.warn("missing-rank", f"rank {graphs[0].rank}: {text}")
    if not graphs:
        findings.error("unreadable", "no graph")
    if not findings.errors:
        graphs = _all_ranks(graphs, findings)
    if not findings.errors:
        check_joins(graphs, findings)
    if not findings.errors:
        with no_collector():
            _prove(graphs, workers, aliases, findings, stats)
    return ValidationResult(not findings.errors, tuple(findings.errors), tuple(findings.warnings), stats)


def _all_ranks(graphs: Sequence[MpkGraph], findings: Findings) -> Sequence[MpkGraph]:
    """The graphs of all ranks. A rank without a file gets a mirrored copy of the first rank that has one."""
    present, count = {graph.rank for graph in graphs}, n_ranks(graphs)
    if len(present) < len(graphs):
        ranks = [graph.rank for graph in graphs]
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        findings.error("rank-twice", f"rank {twice}: {ranks.count(twice)} files")
        return graphs
    if len(present) == count:
        return graphs
    if count > MAX_RANKS:
        findings.error("missing-rank", f"the program has {count} ranks, more than {MAX_RANKS}")
        return graphs
    missing = [rank for rank in range(count) if rank not in present]
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    findings.warn("missing-rank", f"{names}: no file; taken to be as rank {graphs[0].rank}, as MPK emits it for them")
    return sorted([*graphs, *(mirrored(graphs[0], rank, count) for rank in missing)], key=lambda graph: graph.rank)


def _prove(
    graphs: Sequence[MpkGraph],
    workers: int | None,
    aliases: Mapping[str, str],
    findings: Findings,
    stats: dict[str, int],
) -> None:
    if workers is not None:
        stats["workers"] = workers
        check_queue_lengths(graphs, workers, findings)
        if findings.errors:
            return
    joint = join(graphs, workers, aliases)
    nodes = joint.nodes
    order = topological_positions(nodes)
    if len(order) < len(nodes):
        _report_cycle(joint, order, findings)
        return
    serial = fire(nodes, serial=True)
    if len(serial) < len(nodes):
        _report_stuck(joint, workers, findings)
        return
    races = _races(joint, graphs, workers, serial)
    joint = races.joint
    stats["levels"] = races.before.depth
    report_clashes(Clashes(joint, graphs, races.clashes), findings)
    if not findings.errors:
        _report_mixed(races, findings)
    if not findings.errors:
        _report_missed(graphs, races, findings)
    for code, found, text in (
        ("late-read", races.late, "which only later tasks write: what the iteration before left there"),
        ("unwritten-read", joint.gaps, "where no task writes it"),
    ):
        alike: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for index, cell in found:
            alike.setdefault((joint.nodes[index].label, grid_at(joint.grids, cell).name), []).append((index, cell))
        for (index, cell), *others in alike.values():
            more = f"; {len(others)} more reads are like this one" if others else ""
            place = joint.nodes[index].place
            findings.warn(code, f"{joint.name(index)}: reads {tensor_at(joint, cell)}, {text}{more}", place)


def races_of(graphs: Sequence[MpkGraph], workers: int | None, aliases: Mapping[str, str]) -> Races:
    """The races of the graphs of all ranks, none of which blocks."""
    joint = join(graphs, workers, aliases)
    return _races(joint, graphs, workers, fire(joint.nodes, serial=True))


def _races(joint: Joint, graphs: Sequence[MpkGraph], workers: int | None, order: Sequence[int]) -> Races:
    """The races of one iteration, whose nodes fire in `order`; if it has none, those with the next one."""
    if len(graphs) == 1:
        races = _swept(joint, workers, order, len(order))
        if races.clashes or _ends_last(joint, graphs[0]):
            return races
    count = len(order)
    order = [*order, *(count + index for index in order)]
    return _swept(continued(joint, graphs, workers), workers, order, count)


def _swept(joint: Joint, workers: int | None, order: Sequence[int], first: int) -> Races:
    """The races of the nodes that fire in `order`; if the `first` nodes have some, only theirs."""
    nodes = joint.nodes
    before = HappensBefore(nodes, order)
    queues = None if workers is None else QueueOrder(nodes, order)
    swept = sweep(nodes, order, before, joint.touches, queues, first)
    return Races(joint, before, swept.clashes, [(index, cell) for index, cell in swept.late if nodes[index].turn == 0])


def _report_mixed(races: Races, findings: Findings) -> None:
    """Report events whose signals of two iterations may mix: a counter adds up over iterations, so all signals of one
    iteration must come before the first of the next."""
    awaited = {wait.counter for node in races.joint.nodes for wait in node.waits}
    for index, node in enumerate(races.joint.nodes):
        counter = node.out_counter - counter_of(0, 0, 1)
        if node.turn and counter in awaited and not races.before.reached((counter,), races.before.wait_class[index]):
            text = "may signal its event while a task of this one that signals it, too, is not done"
            findings.error("mixed-iterations", f"{races.joint.name(index)}: {text}", node.place)
            if findings.full:
                return


def _report_missed(graphs: Sequence[MpkGraph], races: Races, findings: Findings) -> None:
    """Report waits that may never end: a wait for another GPU's event compares for equality, so it misses its number if
    the next iteration signals that event before the wait is over."""
    tagged = {
        (graph.rank, place)
        for graph in graphs
        for place, task in enumerate(graph.tasks)
        if task.dependent != INVALID and is_remote(task.dependent)
    }
    nodes = races.joint.nodes
    signalling: dict[int, set[int]] = {}
    for index, node in enumerate(nodes):
        if node.turn:
            signalling.setdefault(node.out_counter - counter_of(0, 0, 1), set()).add(races.before.wait_class[index])
    for index, node in enumerate(nodes):
        if node.turn or (node.rank, node.place) not in tagged:
            continue
        later = {group for wait in node.waits for group in signalling.get(wait.counter, ())}
        if not all(races.before.reached((node.out_counter,), group) for group in later):
            text = "waits for a number of signals that the next iteration's may have passed before it looks"
            findings.error("missed-signal", f"{races.joint.name(index)}: {text}", node.place)
            if findings.full:
                return


def _ends_last(joint: Joint, graph: MpkGraph) -> bool:
    """Whether every task is done when the iteration of the only rank ends, walked back from there."""
    awaited: dict[int, set[int]] = {}
    for node in joint.nodes:
        awaited.setdefault(node.out_counter, set()).update([wait.counter for wait in node.waits])
    end = next(number for number, event in enumerate(graph.events) if event.kind == END)
    found, fresh = {counter_of(graph.rank, end)}, [counter_of(graph.rank, end)]
    while fresh:
        earlier = awaited.get(fresh.pop(), set()) - found
        found |= earlier
        fresh += earlier
    return awaited.keys() <= found


def _report_cycle(joint: Joint, order: Sequence[int], findings: Findings) -> None:
    cycle = find_cycle(joint.nodes, order)
    shown = " -> ".join(joint.name(index) for index in cycle[:8])
    more = f" -> ... {len(cycle)} tasks" if len(cycle) > 8 else ""
    place = joint.nodes[cycle[0]].place if cycle else None
    findings.error("cycle", f"tasks wait for each other: {shown}{more}", place)


def _report_stuck(joint: Joint, workers: int | None, findings: Findings) -> None:
    for index in stuck_in_queues(joint.nodes)[:8]:
        node = joint.nodes[index]
        events = ", ".join(str(wait.counter & 0x7FFFFFFF) for wait in node.waits)
        where = f"worker {(node.sm or 0) % workers}" if workers else "with one worker, it"
        text = f"{joint.name(index)}: {where} blocks here for ever, waiting for event {events}"
        hint = "" if workers else "; with more workers it depends on their number, which --workers gives"
        findings.error("queue-deadlock", text + hint, node.place)
