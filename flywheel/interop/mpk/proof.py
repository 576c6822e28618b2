"""The proof that a task graph is safe to launch: it ends, and its tasks read and write every cell in one fixed order.

The order and the walk are the ones of our own programs (flywheel.ir.order, firing, validate.sweep). This module gives
them the meaning of events in MPK's runtime. Types, events, launches, and the number of signals of each event are
checked before. Source: docs/mpk.md, "The runtime" and "What is proved".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flywheel.interop.mpk.explain import Clashes, name_of, report_clashes, tensor_at
from flywheel.interop.mpk.graph import (
    BEGIN_TASK,
    EMPTY,
    END,
    EVENT_TYPES,
    FIRST_TASK,
    INVALID,
    LAUNCH_DEPENDENT,
    LAUNCHING,
    TERMINATE_TASK,
    TERMINATION,
    MpkGraph,
    is_remote,
    place_of,
    rank_of,
)
from flywheel.interop.mpk.joint import Joint, continued, counter_of, join, launched_by, mirrored, n_ranks, producers
from flywheel.interop.mpk.kinds import BEGIN, KINDS, PUTS, TERMINATE, TILE_ALLREDUCE, kind_name
from flywheel.interop.mpk.regions import grid_at
from flywheel.ir.dag import find_cycle, topological_positions
from flywheel.ir.firing import fire, stuck_in_queues
from flywheel.ir.order import HappensBefore, QueueOrder
from flywheel.ir.validate.findings import Findings, ValidationResult
from flywheel.ir.validate.sweep import Clash, sweep
from flywheel.process import no_collector

CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "unreadable": "the file is no task graph",
        "bad-task": "tasks 0 and 1 are not TERMINATE and BEGIN_TASK_GRAPH, or a type has other operands",
        "bad-event": "an event that is not there, of another GPU or of no known type, or that its task cannot signal",
        "no-end": "not exactly one event that ends the iteration, at the end of the list",
        "rank-twice": "two files of one rank",
        "not-launched": "a task that no event puts into a queue, or that more than one does",
        "unsatisfiable-wait": "an event that fewer tasks signal than it needs",
        "partial-join": "an event that more tasks signal than it needs, so that any of them may be the missing one",
        "cycle": "tasks that wait for each other",
        "queue-deadlock": "workers' queues that block for ever",
        "bad-workers": "a number of workers that MPK's runtime does not take",
        "queue-overflow": "more tasks than a worker's queue holds",
        "missed-signal": "a wait for an exact count, which the next iteration may exceed before the waiter polls",
        "mixed-iterations": "an event that the next iteration may signal in place of this one",
        "race-read": "a read that is in no order with a write of the same bytes",
        "race-write": "two writes of the same bytes that are in no order",
        "missing-rank": "a rank whose file is not here: it is taken to be as another one, if their number is known",
        "unknown-type": "an unknown task type; it is assumed to write every tensor that it lists",
        "late-read": "a read of data that only later tasks write, so it sees the previous iteration's data",
        "unwritten-read": "a read of bytes that no task writes, of a tensor that tasks write",
        "blocking-launch": "a task launched late that waits, or that one launched at the start waits for",
        "unfinished-collective": "an all-reduce that does not wait for its non-blocking transfer",
    }
)
"""Every finding's code and what it means."""

QUEUE_TASKS: Final = 8192
QUEUE_TASKS_2025: Final = 1024
"""Tasks that a worker's queue holds. Source: persistent_kernel.cuh, per_worker_queue_len."""

MAX_WORKERS: Final = 160
"""Source: runtime_header.h, MAX_NUM_WORKERS."""


def check_graph(graph: MpkGraph, findings: Findings) -> None:
    """Check the first two tasks, the types, the events and the launches of one rank."""
    begin = graph.tasks[BEGIN_TASK]
    if (graph.tasks[TERMINATE_TASK].kind, begin.kind) != (TERMINATE, BEGIN):
        kinds = f"{kind_name(graph.tasks[TERMINATE_TASK].kind)} and {kind_name(begin.kind)}"
        findings.error("bad-task", f"rank {graph.rank}: tasks 0 and 1 are {kinds}, not TERMINATE and BEGIN_TASK_GRAPH")
        return
    _check_events(graph, findings)
    for place, task in enumerate(graph.tasks):
        if place >= FIRST_TASK:
            _check_kind(graph, place, findings)
        elif task.dependent != INVALID:
            findings.error(
                "bad-event", f"{name_of(graph, place)}: waits for an event, which its place in the list cannot"
            )
        _check_event(graph, place, task.dependent, "waits for", findings)
        _check_event(graph, place, task.trigger, "signals", findings)
        if findings.full:
            return
    faulty = bool(findings.errors)
    _check_collectives(graph, findings)
    if not faulty:
        _check_launches(graph, findings)


def _check_collectives(graph: MpkGraph, findings: Findings) -> None:
    """A tile all-reduce does not wait for its transfer, so no graph with one can be proved."""
    places = [place for place, task in enumerate(graph.tasks) if task.kind == TILE_ALLREDUCE]
    if places:
        more = f"; {len(places) - 1} more tasks are like this one" if len(places) > 1 else ""
        text = "signals without waiting for its non-blocking transfer, so what waits for it may read too early"
        findings.error("unfinished-collective", f"{name_of(graph, places[0])}: {text}{more}", places[0])


def _check_events(graph: MpkGraph, findings: Findings) -> None:
    for number, event in enumerate(graph.events):
        if event.kind not in EVENT_TYPES:
            findings.error("bad-event", f"rank {graph.rank} event {number}: no type of event is {event.kind}")
        if event.kind in LAUNCHING and not FIRST_TASK <= event.first <= event.last <= len(graph.tasks):
            text = f"rank {graph.rank} event {number}: launches tasks {event.first}..{event.last} of {len(graph.tasks)}"
            findings.error("bad-event", text)
        if findings.full:
            return
    launched = sum(event.last - event.first for event in graph.events if event.kind in LAUNCHING)
    if not findings.errors and launched > 2 * len(graph.tasks):
        text = f"events launch {launched} tasks, of which there are {len(graph.tasks) - FIRST_TASK}"
        findings.error("not-launched", f"rank {graph.rank}: {text}")
    ends = [number for number, event in enumerate(graph.events) if event.kind == END]
    if len(ends) != 1:
        findings.error("no-end", f"rank {graph.rank}: {len(ends)} events end the iteration, not one")
    elif ends[0] != len(graph.events) - 1:
        findings.error("no-end", f"rank {graph.rank} event {ends[0]}: ends the iteration and is not the last event")


def _check_kind(graph: MpkGraph, place: int, findings: Findings) -> None:
    task = graph.tasks[place]
    kind, listed = KINDS.get(task.kind), (len(task.inputs), len(task.outputs))
    if kind is None:
        findings.warn("unknown-type", f"{name_of(graph, place)}: counts as if it wrote all that it lists", place)
    elif listed != (kind.inputs, kind.outputs):
        text = f"{listed[0]} inputs and {listed[1]} outputs, not {kind.inputs} and {kind.outputs}"
        findings.error("bad-task", f"{name_of(graph, place)}: {text}", place)
    if task.trigger == INVALID and task.kind in PUTS:
        findings.error(
            "bad-event", f"{name_of(graph, place)}: signals no event, so whose memory it writes is not known"
        )
    if task.trigger != INVALID and is_remote(task.trigger) != (task.kind in PUTS):
        far = is_remote(task.trigger)
        text = "signals another GPU's event, which its type cannot" if far else "signals no other GPU"
        findings.error("bad-event", f"{name_of(graph, place)}: {text}", place)


def _check_event(graph: MpkGraph, place: int, event: int, does: str, findings: Findings) -> None:
    if event == INVALID:
        return
    remote = does == "signals" and is_remote(event)
    number, rank = place_of(event), rank_of(event)
    if number < len(graph.events) and remote == (rank != graph.rank):
        return
    if number >= len(graph.events):
        text = f"of {len(graph.events)}"
    else:
        text = "of its own rank as if another GPU's" if remote else f"of rank {rank}, not {graph.rank}"
    findings.error("bad-event", f"{name_of(graph, place)}: {does} event {number} {text}", place)


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
            findings.error("blocking-launch", f"{name_of(graph, place)}: {text}", place)


def _check_signallers(graphs: Sequence[MpkGraph], findings: Findings) -> None:
    """Launching and ending events have signals of their own GPU only, that of task 1 only task 1's, event 0 none."""
    by_rank = {graph.rank: graph for graph in graphs}
    for graph in graphs:
        for place, task in enumerate(graph.tasks):
            target = None if task.trigger == INVALID else by_rank.get(rank_of(task.trigger))
            if target is None or place == TERMINATE_TASK:
                continue
            number = place_of(task.trigger)
            if number >= len(target.events):
                text = f"of {len(target.events)}"
            elif not number or target.events[number].kind == TERMINATION:
                text = "which ends the launch"
            elif place != BEGIN_TASK and number == place_of(target.tasks[BEGIN_TASK].trigger):
                text = "which begins an iteration"
            elif target.rank != graph.rank and target.events[number].kind != EMPTY:
                text = f"of another GPU, which is {EVENT_TYPES[target.events[number].kind]}"
            else:
                continue
            findings.error("bad-event", f"{name_of(graph, place)}: signals event {number} {text}", place)
            if findings.full:
                return


def _check_prelaunched(graphs: Sequence[MpkGraph], findings: Findings) -> None:
    """No task launched at the start waits for one that is launched later, which may stand behind it in its queue."""
    late: set[tuple[int, int]] = set()
    prelaunched: list[tuple[MpkGraph, int]] = []
    for graph in graphs:
        begin = place_of(graph.tasks[BEGIN_TASK].trigger)
        for place, events in launched_by(graph).items():
            task = graph.tasks[place]
            if events == [begin]:
                prelaunched.append((graph, place))
            elif task.trigger != INVALID:
                late.add((rank_of(task.trigger), place_of(task.trigger)))
    for graph, place in prelaunched if late else []:
        dependent = graph.tasks[place].dependent
        if dependent != INVALID and (graph.rank, place_of(dependent)) in late:
            text = (
                f"launched at the start, and waits for event {place_of(dependent)}, which a task launched later signals"
            )
            findings.error("blocking-launch", f"{name_of(graph, place)}: {text}", place)
            if findings.full:
                return


def check_joins(graphs: Sequence[MpkGraph], findings: Findings) -> None:
    """Check that an event that launches, ends or is awaited needs exactly as many signals as tasks give it."""
    _check_signallers(graphs, findings)
    _check_prelaunched(graphs, findings)
    if findings.errors:
        return
    made = producers(graphs)
    alike: dict[tuple[int, int, int], list[int]] = {}
    for graph in graphs:
        awaited = {place_of(task.dependent) for task in graph.tasks if task.dependent != INVALID}
        for number, event in enumerate(graph.events):
            count = made[graph.rank, number]
            acts = event.kind in LAUNCHING or event.kind == END
            if (count == event.triggers and (count or not acts)) or not (acts or number in awaited):
                continue
            alike.setdefault((graph.rank, event.triggers, count), []).append(number)
    for (rank, wanted, count), numbers in alike.items():
        more = f"; {len(numbers) - 1} more events are like this one" if len(numbers) > 1 else ""
        signals = "1 signal" if wanted == 1 else f"{wanted} signals"
        where = f"rank {rank} event {numbers[0]}: needs {signals} and has {count}"
        if count < wanted or not count:
            findings.error("unsatisfiable-wait", f"{where}, so what waits for it waits for ever{more}")
        else:
            findings.error("partial-join", f"{where}, so it may be met while one of them is not done{more}")
        if findings.full:
            return


def check_queue_lengths(graphs: Sequence[MpkGraph], workers: int, findings: Findings) -> None:
    """Check that the runtime takes that many workers, and that their queues hold the tasks of an iteration."""
    if not 1 <= workers <= MAX_WORKERS:
        findings.error("bad-workers", f"{workers:,} workers; MPK's runtime takes 1..{MAX_WORKERS}")
        return
    for graph in graphs:
        longest = -(-(len(graph.tasks) - FIRST_TASK) // workers)
        most = QUEUE_TASKS if graph.tasks[0].metadata else QUEUE_TASKS_2025
        if longest >= most:
            text = f"rank {graph.rank}: {longest} tasks an iteration for a worker, whose queue holds {most}"
            findings.error("queue-overflow", text)


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
