"""Events that could be split: tasks that signal an event and tasks that wait for it, grouped by the memory they
share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from flywheel.interop.mpk.graph import EMPTY, FIRST_TASK, INVALID, MpkGraph, is_remote, place_of
from flywheel.interop.mpk.joint import join
from flywheel.ir.validate.sweep import Touches

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Positions of some tasks that signal an event, and of some tasks that wait for it."""

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})


def components(graph: MpkGraph, aliases: Mapping[str, str] = _NO_ALIASES) -> dict[int, list[Group]]:
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


def _groups(touches: Sequence[Touches], first: Sequence[int], second: Sequence[int]) -> list[Group]:
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
