"""Other schedules of a task graph, without touching its kernels: the order of its tasks, which is their placement, the
groups in which they are awaited, and whether they are launched ahead of time or just in time.

Operands, types and variants stay as they are. A schedule moves tasks, and changes events and the events that tasks wait
for and signal. An event can be split where the tasks that signal it and those that wait for it fall into groups that
share no memory. The proof (flywheel.interop.mpk.proof) says whether the new graph is safe.
Source: docs/mpk.md, "Other schedules".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

from flywheel.interop.mpk.graph import (
    BEGIN_TASK,
    EMPTY,
    FIRST_TASK,
    INVALID,
    LAUNCH,
    LAUNCH_MASSIVE,
    MpkGraph,
    event_id,
    graph_of,
    is_remote,
    place_of,
)
from flywheel.interop.mpk.joint import join
from flywheel.interop.mpk.timing import H200, Runtime, as_far, predict_step, streamed_bytes
from flywheel.ir.firing import fire
from flywheel.ir.validate.sweep import Touches

EventGroup = tuple[tuple[int, ...], tuple[int, ...]]
"""Positions of some tasks that signal an event, and of some tasks that wait for it."""

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})


def components(graph: MpkGraph, aliases: Mapping[str, str] = _NO_ALIASES) -> dict[int, list[EventGroup]]:
    """The groups of tasks of each event, by the event's position. Only events of type EMPTY with at least two groups
    appear.

    Tasks of different groups share no memory, apart from memory that both only read. A task that shares no memory with
    any task on the other side of its event belongs to the first group.
    """
    signalling: dict[int, list[int]] = {}
    waiting: dict[int, list[int]] = {}
    for place, task in enumerate(graph.tasks[FIRST_TASK:], FIRST_TASK):
        if task.trigger != INVALID and not is_remote(task.trigger):
            signalling.setdefault(place_of(task.trigger), []).append(place)
        if task.dependent != INVALID and not is_remote(task.dependent):
            waiting.setdefault(place_of(task.dependent), []).append(place)
    touches = join([graph], None, aliases).touches
    found = {}
    for number, event in enumerate(graph.events):
        first, second = signalling.get(number, []), waiting.get(number, [])
        if event.kind == EMPTY and len(first) > 1 and len(second) > 1:
            groups = _groups(touches, first, second)
            if len(groups) > 1:
                found[number] = groups
    return found


def _groups(touches: Sequence[Touches], first: Sequence[int], second: Sequence[int]) -> list[EventGroup]:
    parent = {place: place for place in (*first, *second)}

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    readers, writers = _users(touches, first)
    for place in second:
        reads, writes = _cells(touches[place - FIRST_TASK])
        before = [other for cell in reads | writes for other in writers.get(cell, ())]
        before += [other for cell in writes for other in readers.get(cell, ())]
        for other in before:
            parent[root(other)] = root(place)
    members: dict[int, tuple[list[int], list[int]]] = {}
    for side, places in enumerate((first, second)):
        for place in places:
            members.setdefault(root(place), ([], []))[side].append(place)
    whole = sorted([each for each in members.values() if all(each)], key=lambda each: each[1][0])
    for each in members.values():
        if whole and not all(each):
            whole[0][0].extend(each[0])
            whole[0][1].extend(each[1])
    return [(tuple(sorted(signals)), tuple(sorted(waits))) for signals, waits in whole]


def _users(touches: Sequence[Touches], places: Sequence[int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The positions of the tasks that read each cell, and of those that write it."""
    readers: dict[int, list[int]] = {}
    writers: dict[int, list[int]] = {}
    for place in places:
        reads, writes = _cells(touches[place - FIRST_TASK])
        for cell in reads:
            readers.setdefault(cell, []).append(place)
        for cell in writes:
            writers.setdefault(cell, []).append(place)
    return readers, writers


def _cells(touch: Touches) -> tuple[set[int], set[int]]:
    return {cell for part in touch.reads for cell in part}, {
        cell for part in (*touch.writes, *touch.adds) for cell in part
    }


ORDERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "given": "as in the file",
        "met": "by when their events are met where no task stands behind another",
        "critical": "those with the longest way to the end first",
        "largest": "of those with one event, what streams most first",
        "turned": "of those with one event, every other time the last first",
    }
)
EVENTS: Final[Mapping[str, str]] = MappingProxyType(
    {"given": "as in the file", "split": "each for tasks that touch the same memory only"}
)
LAUNCHES: Final[Mapping[str, str]] = MappingProxyType(
    {"ahead": "all at the start of an iteration", "just in time": "each when its event is met"}
)


@dataclass(frozen=True, slots=True)
class GraphSchedule:
    """A schedule of a graph: a key of ORDERS, one of EVENTS and one of LAUNCHES, and the number of workers."""

    order: str
    events: str
    launch: str
    workers: int


def launch_of(graph: MpkGraph) -> str:
    """How the tasks of a graph are launched, a key of LAUNCHES."""
    late = any(event.kind in (LAUNCH, LAUNCH_MASSIVE) for event in graph.events)
    return "just in time" if late else "ahead"


def reschedule(graph: MpkGraph, schedule: GraphSchedule, runtime: Runtime = H200, context: int = 512) -> MpkGraph:
    """The graph of one rank in another schedule; the graph itself if it already has that schedule.

    The graph must have passed the proof. Orders that depend on times take them from `runtime`, for `context` tokens.
    """
    launched = launch_of(graph)
    if (schedule.order, schedule.events, schedule.launch) == ("given", "given", launched):
        return graph
    made = _ahead(graph) if launched != "ahead" else graph
    if schedule.events == "split":
        made = _split(made)
    if schedule.order != "given":
        made = _ordered(made, _keys(made, schedule.order, runtime, context))
    return _just_in_time(made) if schedule.launch != "ahead" else made


def _keys(graph: MpkGraph, order: str, runtime: Runtime, context: int) -> list[float]:
    """A key for each task behind the first two. Of the tasks that may come next, the one with the least key does."""
    count = len(graph.tasks) - FIRST_TASK
    if order == "critical":
        return _ways(graph, runtime, context)
    if order == "met":
        met_us = [0.0] * count
        for span in predict_step(graph, runtime, context, len(graph.tasks)).spans:
            met_us[span.node] = span.met_us
        return met_us
    groups: dict[int, list[int]] = {}
    for index, task in enumerate(graph.tasks[FIRST_TASK:]):
        groups.setdefault(task.dependent, []).append(index)
    nbytes = streamed_bytes(graph, context)
    keys = [0.0] * count
    for number, members in enumerate(groups.values()):
        turned = members[::-1] if number % 2 else members
        ranked = turned if order == "turned" else sorted(members, key=lambda index: -nbytes[index])
        for place, index in enumerate(ranked):
            keys[index] = members[place]
    return keys


def _ways(graph: MpkGraph, runtime: Runtime, context: int) -> list[float]:
    """Minus the time of the longest path from the start of each task to the end of the iteration, in us."""
    nodes, nbytes = as_far(graph, 1), streamed_bytes(graph, context)
    behind: dict[int, float] = {}
    keys = [0.0] * len(nodes)
    for index in reversed(fire(nodes)):
        own_us = runtime.task_us + runtime.event_us + nbytes[index] / runtime.worker_gbs / 1e3
        keys[index] = -(behind.get(nodes[index].out_counter, 0.0) + own_us)
        for wait in nodes[index].waits:
            behind[wait.counter] = max(behind.get(wait.counter, 0.0), -keys[index])
    return keys


def _ordered(graph: MpkGraph, keys: Sequence[float]) -> MpkGraph:
    nodes = as_far(graph, 1)
    order = fire(nodes, keys)
    if len(order) < len(nodes):  # what other ranks signal does not follow from this one
        return graph
    return _listed(graph, [nodes[index].place for index in order])


def _listed(graph: MpkGraph, places: Sequence[int]) -> MpkGraph:
    """The graph, launched ahead of time. The tasks behind the first two stand in the order of the given positions."""
    tasks = graph.document["all_tasks"]
    moved = {place: number for number, place in enumerate(places, FIRST_TASK)}
    document = dict(graph.document)
    document["all_tasks"] = [*tasks[:FIRST_TASK], *(tasks[place] for place in places)]
    document["first_tasks"] = [moved.get(place, place) for place in document["first_tasks"]]
    document["all_events"] = _ranged(document["all_events"], document["all_tasks"])
    return graph_of(document, graph.layout)


def _ranged(events: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events, those of type EMPTY with the range of the tasks that wait for them, as MPK's compiler writes it."""
    waiting: dict[int, list[int]] = {}
    for place, task in enumerate(tasks):
        if task["dependent_event"] != INVALID:
            waiting.setdefault(place_of(task["dependent_event"]), []).append(place)
    return [
        {**event, "first_task_id": waiting[number][0], "last_task_id": waiting[number][-1] + 1}
        if event["event_type"] == EMPTY and number in waiting
        else dict(event)
        for number, event in enumerate(events)
    ]


def _split(graph: MpkGraph) -> MpkGraph:
    """Each event of type EMPTY as several, where the tasks on both sides fall into groups that share no memory."""
    parts = components(graph)
    if not parts:
        return graph
    tasks = [dict(task) for task in graph.document["all_tasks"]]
    *events, end = (dict(event) for event in graph.document["all_events"])
    last = len(events)
    for number, groups in sorted(parts.items()):
        for place, (signalling, waiting) in enumerate(groups):
            target = len(events) if place else number
            if place:
                events.append(dict(events[number]))
            events[target]["num_triggers"] = len(signalling)
            for index in signalling:
                tasks[index]["trigger_event"] = event_id(graph.rank, target)
            for index in waiting:
                tasks[index]["dependent_event"] = event_id(graph.rank, target)
    for task, given in zip(tasks, graph.tasks, strict=True):
        if given.trigger == event_id(graph.rank, last):
            task["trigger_event"] = event_id(graph.rank, len(events))
    document = {**graph.document, "all_tasks": tasks, "all_events": _ranged([*events, end], tasks)}
    return graph_of(document, graph.layout)


def _ahead(graph: MpkGraph) -> MpkGraph:
    """All tasks launched at the start of an iteration, in an order that one worker could take."""
    tasks = [dict(task) for task in graph.document["all_tasks"]]
    events = [dict(event) for event in graph.document["all_events"]]
    for number, event in enumerate(graph.events):
        if event.kind in (LAUNCH, LAUNCH_MASSIVE):
            events[number]["event_type"] = EMPTY
            for place in range(max(event.first, FIRST_TASK), min(event.last, len(tasks))):
                tasks[place]["dependent_event"] = event_id(graph.rank, number)
    begin = place_of(graph.tasks[BEGIN_TASK].trigger)
    events[begin]["first_task_id"], events[begin]["last_task_id"] = FIRST_TASK, len(tasks)
    made = graph_of({**graph.document, "all_tasks": tasks, "all_events": events}, graph.layout)
    return _ordered(made, [float(place) for place in range(len(tasks) - FIRST_TASK)])


def _just_in_time(graph: MpkGraph) -> MpkGraph:
    """The graph with each task launched when its event is met; the tasks of one event stand in a row.

    Signals of another GPU launch nothing, so tasks that wait for them, or for nothing, are launched at the start. If
    that is impossible, the graph stays as it is.
    """
    places = range(FIRST_TASK, len(graph.tasks))
    groups: dict[int, list[int]] = {}
    for place in places:
        groups.setdefault(graph.tasks[place].dependent, []).append(place)
    early = groups.pop(INVALID, [])
    if any(event_id(graph.rank, place_of(event)) != event for event in groups):
        return graph
    ordered = [*early, *(place for members in groups.values() for place in members)]
    made = _listed(graph, ordered)
    events = [dict(event) for event in made.document["all_events"]]
    tasks = made.tasks[FIRST_TASK:]
    for dependent, members in groupby(enumerate(tasks, FIRST_TASK), key=lambda item: item[1].dependent):
        if dependent != INVALID:
            found = [place for place, _ in members]
            event = events[place_of(dependent)]
            event["event_type"] = LAUNCH_MASSIVE if len(found) > 1 else LAUNCH
            event["first_task_id"], event["last_task_id"] = found[0], found[-1] + 1
    begin = place_of(graph.tasks[BEGIN_TASK].trigger)
    events[begin]["first_task_id"], events[begin]["last_task_id"] = FIRST_TASK, FIRST_TASK + len(early)
    return graph_of({**made.document, "all_events": events}, graph.layout)
