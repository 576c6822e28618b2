"""The proof that a task graph can be launched: it ends, and what its tasks read and write is in one order.

The relation and the walk are those of our own programs (flywheel.ir.order, firing, validate.sweep); here is what MPK's
runtime means by its events. Source: docs/mpk.md, "What is proved".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from flywheel.interop.mpk.explain import Clashes, name_of, report_clashes, tensor_at
from flywheel.interop.mpk.graph import (
    BEGIN_TASK,
    END,
    EVENT_TYPES,
    FIRST_TASK,
    INVALID,
    LAUNCH_DEPENDENT,
    LAUNCHING,
    TERMINATE_TASK,
    MpkGraph,
    is_remote,
    place_of,
    rank_of,
)
from flywheel.interop.mpk.joint import Joint, counter_of, join, launched_by, mirrored, n_ranks, producers
from flywheel.interop.mpk.kinds import BEGIN, KINDS, PUTS, TERMINATE, TILE_ALLREDUCE, kind_name
from flywheel.ir.clocks import QueueClocks
from flywheel.ir.dag import find_cycle, topological_positions
from flywheel.ir.firing import fire, stuck_in_queues
from flywheel.ir.order import HappensBefore
from flywheel.ir.validate.findings import Findings, ValidationResult
from flywheel.ir.validate.sweep import sweep

CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "unreadable": "the file is no task graph",
        "bad-task": "tasks 0 and 1 are not TERMINATE and BEGIN_TASK_GRAPH, or a type has other operands",
        "bad-event": "an event that is not there, of another GPU, of an unknown type, or of a task that cannot signal it",
        "no-end": "not exactly one event that ends the iteration",
        "rank-twice": "two files of one rank",
        "not-launched": "a task that no event puts into a queue, or that more than one does",
        "unsatisfiable-wait": "an event that fewer tasks signal than it needs",
        "partial-join": "an event that more tasks signal than it needs, so that any of them may be the missing one",
        "cycle": "tasks that wait for each other",
        "queue-deadlock": "workers' queues that block for ever",
        "queue-overflow": "more tasks than a worker's queue holds",
        "race-read": "a read that is in no order with a write of the same bytes",
        "race-write": "two writes of the same bytes that are in no order",
        "missing-rank": "a rank whose file is not here: it is taken to be as another one",
        "unknown-type": "a type of task that is not known: it counts as if it wrote all that it lists",
        "late-read": "a read of what only later tasks write: of what the iteration before left there",
        "unwritten-read": "a read of bytes that no task writes, beside others that are written",
        "blocking-launch": "a task that is launched by one event and waits for another, in front of tasks launched later",
        "unfinished-collective": "an all-reduce that signals before its non-blocking transfer is known to be done",
    }
)
"""Every finding's code and what it means."""

QUEUE_TASKS: Final = 1024
"""Tasks that a worker's queue holds. Source: persistent_kernel.cuh, per_worker_queue_len."""

MAX_WORKERS: Final = 160
"""Source: runtime_header.h, MAX_NUM_WORKERS."""

MAX_RANKS: Final = 16
"""Most ranks of a program whose files are not all there."""

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})


def check(
    graphs: Sequence[MpkGraph], workers: int | None = None, aliases: Mapping[str, str] = _NO_ALIASES
) -> ValidationResult:
    """Prove the graphs of the ranks of one program safe together, or say why not. Never raises.

    Without `workers` the verdict holds for any number of them and any placement; with it, for MPK's queues of so many
    workers, whose order then counts. `aliases` are names of tensors that are another's memory.
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
            _check_graph(graph, findings)
    if not findings.errors:
        graphs = _all_ranks(graphs, findings)
    if not findings.errors:
        _check_joins(graphs, findings)
    if not findings.errors:
        _prove(graphs, workers, aliases, findings, stats)
    return ValidationResult(not findings.errors, tuple(findings.errors), tuple(findings.warnings), stats)


def _all_ranks(graphs: Sequence[MpkGraph], findings: Findings) -> Sequence[MpkGraph]:
    """The graphs of all ranks: one whose file is not here is taken to be as the first of those that are."""
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


def _check_graph(graph: MpkGraph, findings: Findings) -> None:
    begin = graph.tasks[BEGIN_TASK]
    if (graph.tasks[TERMINATE_TASK].kind, begin.kind) != (TERMINATE, BEGIN):
        kinds = f"{kind_name(graph.tasks[TERMINATE_TASK].kind)} and {kind_name(begin.kind)}"
        findings.error("bad-task", f"rank {graph.rank}: tasks 0 and 1 are {kinds}, not TERMINATE and BEGIN_TASK_GRAPH")
        return
    for number, event in enumerate(graph.events):
        if event.kind not in EVENT_TYPES:
            findings.error("bad-event", f"rank {graph.rank} event {number}: no type of event is {event.kind}")
        if event.kind in LAUNCHING and not FIRST_TASK <= event.first <= event.last <= len(graph.tasks):
            text = f"rank {graph.rank} event {number}: launches tasks {event.first}..{event.last} of {len(graph.tasks)}"
            findings.error("bad-event", text)
    ends = [number for number, event in enumerate(graph.events) if event.kind == END]
    if len(ends) != 1:
        findings.error("no-end", f"rank {graph.rank}: {len(ends)} events end the iteration, not one")
    for place, task in enumerate(graph.tasks):
        if place >= FIRST_TASK:
            _check_kind(graph, place, findings)
        _check_event(graph, place, task.dependent, "waits for", findings)
        _check_event(graph, place, task.trigger, "signals", findings)
        if findings.full:
            return
    if not findings.errors:
        _check_launches(graph, findings)


def _check_kind(graph: MpkGraph, place: int, findings: Findings) -> None:
    task = graph.tasks[place]
    kind = KINDS.get(task.kind)
    where = f"{name_of(graph, place)}"
    if kind is None:
        findings.warn("unknown-type", f"{where}: counts as if it wrote all that it lists", place)
    elif (len(task.inputs), len(task.outputs)) != (kind.inputs, kind.outputs):
        text = f"{where}: {len(task.inputs)} inputs and {len(task.outputs)} outputs, not {kind.inputs} and {kind.outputs}"
        findings.error("bad-task", text, place)
    if task.kind == TILE_ALLREDUCE and place == min(p for p, t in enumerate(graph.tasks) if t.kind == TILE_ALLREDUCE):
        text = "and all others of its type: signals before its non-blocking transfer is known to be done"
        findings.warn("unfinished-collective", f"{where}, {text}", place)
    if task.trigger != INVALID and is_remote(task.trigger) != (task.kind in PUTS):
        text = "signals another GPU's event, which its type cannot" if is_remote(task.trigger) else "signals no other GPU"
        findings.error("bad-event", f"{where}: {text}", place)


def _check_event(graph: MpkGraph, place: int, event: int, does: str, findings: Findings) -> None:
    if event == INVALID:
        return
    remote = does == "signals" and is_remote(event)
    number = place_of(event)
    where = f"{name_of(graph, place)}: {does} event {number}"
    if number >= len(graph.events):
        findings.error("bad-event", f"{where} of {len(graph.events)}", place)
    elif not remote and rank_of(event) != graph.rank:
        findings.error("bad-event", f"{where} of rank {rank_of(event)}, not {graph.rank}", place)
    elif remote and rank_of(event) == graph.rank:
        findings.error("bad-event", f"{where} of its own rank as if another GPU's", place)


def _check_launches(graph: MpkGraph, findings: Findings) -> None:
    begin = place_of(graph.tasks[BEGIN_TASK].trigger)
    if graph.events[begin].kind != LAUNCH_DEPENDENT:
        kind = EVENT_TYPES[graph.events[begin].kind]
        findings.error("bad-event", f"rank {graph.rank} event {begin}: task 1 signals it and it is {kind}")
    for place, events in launched_by(graph).items():
        if len(events) != 1:
            listed = f"events {', '.join(map(str, events[:4]))} launch it" if events else "no event launches it"
            findings.error("not-launched", f"{name_of(graph, place)}: {listed}", place)
            if findings.full:
                return
        elif events != [begin] and graph.tasks[place].dependent not in (INVALID, events[0]):
            text = f"launched by event {events[0]}, and waits for event {place_of(graph.tasks[place].dependent)}"
            findings.warn("blocking-launch", f"{name_of(graph, place)}: {text}", place)


def _check_joins(graphs: Sequence[MpkGraph], findings: Findings) -> None:
    """Every event that somebody awaits, or that launches or ends, needs exactly all tasks that signal it."""
    made = producers(graphs)
    for graph in graphs:
        awaited = {place_of(task.dependent) for task in graph.tasks if task.dependent != INVALID}
        for number, event in enumerate(graph.events):
            count = made[graph.rank, number]
            wanted = number in awaited or event.kind in LAUNCHING or event.kind == END
            if count == event.triggers or not wanted:
                continue
            where = f"rank {graph.rank} event {number}: needs {event.triggers} signals and has {count}"
            if count < event.triggers:
                findings.error("unsatisfiable-wait", f"{where}, so what waits for it waits for ever")
            else:
                findings.error("partial-join", f"{where}, so it may be met while one of them is not done")
            if findings.full:
                return


def _prove(
    graphs: Sequence[MpkGraph],
    workers: int | None,
    aliases: Mapping[str, str],
    findings: Findings,
    stats: dict[str, int],
) -> None:
    if workers is not None:
        stats["workers"] = workers
        _check_queue_lengths(graphs, workers, findings)
    joint = join(graphs, workers, 1, aliases)
    nodes = joint.nodes
    order = topological_positions(nodes)
    if len(order) < len(nodes):
        _report_cycle(joint, order, findings)
        return
    serial = fire(nodes, serial=True)
    if len(serial) < len(nodes):
        _report_stuck(joint, workers, findings)
        return
    if len(graphs) > 1 or not _ends_last(joint, graphs[0]):
        joint = join(graphs, workers, 2, aliases)
        nodes, serial = joint.nodes, fire(joint.nodes, serial=True)
    before = HappensBefore(nodes, serial)
    stats["levels"] = before.depth
    swept = sweep(nodes, serial, before, joint.touches)
    clashes = swept.clashes
    if workers is not None and clashes:
        clocks = QueueClocks(nodes, serial)
        clashes = [clash for clash in clashes if not clocks.before(clash.first, clash.second)]
    report_clashes(Clashes(joint, graphs, clashes), findings)
    late = [(index, cell) for index, cell in swept.late if nodes[index].turn == 0]
    for code, found, text in (
        ("late-read", late, "which only later tasks write: what the iteration before left there"),
        ("unwritten-read", joint.gaps, "where no task writes it"),
    ):
        for index, cell in found:
            findings.warn(code, f"{joint.name(index)}: reads {tensor_at(joint, cell)}, {text}", nodes[index].place)


def _ends_last(joint: Joint, graph: MpkGraph) -> bool:
    """Whether every task is done when the iteration of the only rank ends: all that leads to its end, walked backwards."""
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


def _check_queue_lengths(graphs: Sequence[MpkGraph], workers: int, findings: Findings) -> None:
    if not 1 <= workers <= MAX_WORKERS:
        findings.error("queue-overflow", f"{workers} workers are not in 1..{MAX_WORKERS}")
        return
    for graph in graphs:
        longest = -(-(len(graph.tasks) - FIRST_TASK) // workers)
        if longest >= QUEUE_TASKS:
            text = f"rank {graph.rank}: {longest} tasks an iteration for a worker, whose queue holds {QUEUE_TASKS}"
            findings.error("queue-overflow", text)


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
