"""A task graph in words: a summary as JSON-ready values, and findings: which two tasks clash, on which part of
which tensor, and why nothing orders them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flywheel.interop.mpk.graph import (
    EVENT_TYPES,
    FIRST_TASK,
    INVALID,
    ITEM_BYTES,
    LAUNCH,
    LAUNCH_MASSIVE,
    MpkGraph,
    is_remote,
    place_of,
    rank_of,
)
from flywheel.interop.mpk.joint import Joint
from flywheel.interop.mpk.kinds import kind_name
from flywheel.interop.mpk.regions import grid_at, runs_of
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.sweep import MAX_CLASHES, Clash


def describe(graph: MpkGraph) -> dict[str, Any]:
    """Summarise one rank: tasks and events by type, the number of tensors, and how its tasks are launched. `bytes` of a
    type of task counts the bytes of all its inputs."""
    tasks = graph.tasks[FIRST_TASK:]
    tensors = {tensor for task in tasks for tensor in (*task.inputs, *task.outputs)}
    sizes = {
        tensor: sum(width * count for _, width, _, count in runs_of(tensor)) if tensor.data_type in ITEM_BYTES else 0
        for tensor in tensors
    }
    counts = Counter(task.kind for task in tasks)
    listed: Counter[int] = Counter()
    for task in tasks:
        listed[task.kind] += sum(sizes[tensor] for tensor in task.inputs)
    just_in_time = any(event.kind in (LAUNCH, LAUNCH_MASSIVE) for event in graph.events)
    events = Counter(EVENT_TYPES.get(event.kind, f"type {event.kind}") for event in graph.events)
    return {
        "rank": graph.rank,
        "schema": 2026 if graph.tasks[0].metadata else 2025,
        "launch": "just in time" if just_in_time else "ahead of time",
        "tasks": len(graph.tasks),
        "events": ", ".join(f"{name} {count}" for name, count in sorted(events.items())),
        "tensors": len({tensor.name for tensor in tensors}),
        "types": [
            {"type": kind_name(kind), "tasks": count, "bytes": listed[kind]}
            for kind, count in sorted(counts.items(), key=lambda item: (-listed[item[0]], item[0]))
        ],
    }


@dataclass(frozen=True, slots=True)
class Clashes:
    """The clashes that a sweep found in a joint graph, and the graphs that were joined."""

    joint: Joint
    graphs: Sequence[MpkGraph]
    found: Sequence[Clash]

    def waiting(self) -> dict[tuple[int, int], list[int]]:
        """The tasks that wait for each event, by rank and position of the event."""
        places: dict[tuple[int, int], list[int]] = {}
        for graph in self.graphs:
            for place, task in enumerate(graph.tasks):
                if task.dependent != INVALID:
                    places.setdefault((graph.rank, place_of(task.dependent)), []).append(place)
        return places


def name_of(graph: MpkGraph, place: int) -> str:
    """`rank 0 task 18 (REDUCE)`."""
    return f"rank {graph.rank} task {place} ({kind_name(graph.tasks[place].kind)})"


def tensor_at(joint: Joint, cell: int) -> str:
    """`tensor attn_in of rank 0, rows 0..8, bytes 64..128 of 6144`."""
    grid = grid_at(joint.grids, cell)
    rect = grid.rect(cell)
    where = f"tensor {grid.name[:60]} of rank {grid.rank}"
    if rect is None:
        return where
    top, bottom, left, right = rect
    if grid.pitch is None:
        return f"{where}, bytes {left}..{right}"
    rows = f"row {top}" if bottom == top + 1 else f"rows {top}..{bottom}"
    return f"{where}, {rows}, bytes {left}..{right} of {grid.pitch}"


def report_clashes(clashes: Clashes, findings: Findings) -> None:
    """Add one error for each pair of task types and each tensor. It describes the first pair of tasks and counts the
    others."""
    joint = clashes.joint
    groups: dict[tuple[str, str, str, str], Clash] = {}
    counted: Counter[tuple[str, str, str, str]] = Counter()
    for clash in clashes.found:
        first, second = joint.nodes[clash.first], joint.nodes[clash.second]
        grid = grid_at(joint.grids, clash.cell)
        mode = f"{clash.first_writes:d}{clash.second_writes:d}{first.rank != second.rank:d}{second.turn - first.turn}"
        key = (first.label, second.label, grid.name, mode)
        groups.setdefault(key, clash)
        counted[key] += 1
    waiting = clashes.waiting() if groups else {}
    for key, clash in groups.items():
        _report(clashes, clash, counted[key], waiting, findings)
        if findings.full:
            return


def _report(
    clashes: Clashes, clash: Clash, count: int, waiting: Mapping[tuple[int, int], Sequence[int]], findings: Findings
) -> None:
    joint = clashes.joint
    second = joint.nodes[clash.second]
    both = clash.first_writes and clash.second_writes
    does = "writes" if clash.second_writes else "reads"
    did = "writes" if clash.first_writes else "reads"
    text = (
        f"{joint.name(clash.second)}: {does} {tensor_at(joint, clash.cell)}, in no order with {joint.name(clash.first)}"
    )
    text += f", which {did} it, too" if both else f", which {did} it"
    text += f": {_signals(clashes, clash.first, waiting)}; {_waits(clashes, clash.second)}"
    if count > 1:
        least = "at least " if len(clashes.found) >= MAX_CLASHES else ""
        text += f"; {least}{count - 1} more pairs are like this one"
    findings.error("race-write" if both else "race-read", text, second.place)


def _signals(clashes: Clashes, index: int, waiting: Mapping[tuple[int, int], Sequence[int]]) -> str:
    node = clashes.joint.nodes[index]
    graph = next(graph for graph in clashes.graphs if graph.rank == node.rank)
    trigger = graph.tasks[node.place].trigger
    if trigger == INVALID:
        return f"task {node.place} signals nothing"
    number, rank = place_of(trigger), rank_of(trigger)
    where = f"event {number}" + (f" of rank {rank}" if is_remote(trigger) else "")
    places = waiting.get((rank, number), ())
    if not places:
        return f"task {node.place} signals {where}, which no task waits for"
    more = "alone waits" if len(places) == 1 else f"and {len(places) - 1} more wait"
    return f"task {node.place} signals {where}, for which task {places[0]} {more}"


def _waits(clashes: Clashes, index: int) -> str:
    node = clashes.joint.nodes[index]
    graph = next(graph for graph in clashes.graphs if graph.rank == node.rank)
    dependent = graph.tasks[node.place].dependent
    if dependent == INVALID:
        return f"task {node.place} waits for nothing"
    count = graph.events[place_of(dependent)].triggers
    who = "another GPU signals" if is_remote(dependent) else "1 task signals" if count == 1 else f"{count} tasks signal"
    return f"task {node.place} waits for event {place_of(dependent)} only, which {who}"
