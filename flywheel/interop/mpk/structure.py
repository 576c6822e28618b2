"""Checks that come before the proof: types, events, launches, and the number of signals of each event.

Source: docs/mpk.md, "The runtime".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from flywheel.interop.mpk.explain import name_of
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
from flywheel.interop.mpk.joint import launched_by, producers
from flywheel.interop.mpk.kinds import BEGIN, KINDS, PUTS, TERMINATE, TILE_ALLREDUCE, kind_name
from flywheel.ir.validate.findings import Findings

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
