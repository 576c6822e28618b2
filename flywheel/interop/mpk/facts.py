"""A summary of a task graph, as JSON-ready values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flywheel.interop.mpk.graph import EVENT_TYPES, FIRST_TASK, ITEM_BYTES, LAUNCH, LAUNCH_MASSIVE, MpkGraph
from flywheel.interop.mpk.kinds import kind_name
from flywheel.interop.mpk.regions import runs_of


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
