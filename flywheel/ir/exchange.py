"""Pushes and sums: how the GPUs of a program exchange what each has made. Source: docs/ir.md, "Ranks"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flywheel.ir.access import Region, tile
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.records import Buffer, Task

_K = InstructionKind


def is_push(task: Task) -> bool:
    """Whether the task copies its own columns of its one input to its one output, and does nothing else.

    Its params and its recipe are in order.
    """
    if task.op is not _K.FUSED or len(task.inputs) != 1 or len(task.outputs) != 1 or tile(task.params) is None:
        return False
    steps: Sequence[Mapping[str, Any]] = task.params["recipe"]["steps"]
    own = {name: task.params[name] for name in ("M_tile",) if name in task.params}
    return len(steps) == 1 and steps[0]["op"] == _K.COPY.name and steps[0].get("params", {}) == own


def pushed_counters(tasks: Sequence[Task], buffers: Mapping[int, Buffer]) -> frozenset[int]:
    """Counters that tasks signal whose output is on another GPU."""
    return frozenset(
        task.out_counter for task in tasks for number in task.outputs if buffers[number].rank != task.rank
    )


def surely_read(task: Task, operand: int) -> list[Region] | None:
    """Columns of `inputs[operand]` that the task reads whatever happens, of each row; None for all of them.

    Where the task copies its own columns, that is `tile(task.params)`.
    """
    if task.op is not _K.FUSED:
        return None
    regions: list[Region] = []
    for step in task.params["recipe"]["steps"]:
        if any(arg.get("in") == operand for arg in step["args"]):
            columns = tile({**task.params, **step.get("params", {})}) if step["op"] == _K.COPY.name else None
            if columns is None:
                return None
            regions.append(columns)
    return regions


def shards_added(task: Task) -> tuple[int, ...] | None:
    """The buffers that an ALLREDUCE_SHARD of the task adds, in its order; None where it has none, or adds anything else
    than its inputs or its columns of them."""
    if task.op is _K.ALLREDUCE_SHARD:
        return tuple(task.inputs)
    if task.op is not _K.FUSED:
        return None
    copied: dict[int, int] = {}
    found = None
    for step in task.params["recipe"]["steps"]:
        if step["op"] == _K.COPY.name and "in" in step["args"][0] and type(step["out"]) is int:
            copied[step["out"]] = step["args"][0]["in"]
        elif step["op"] == _K.ALLREDUCE_SHARD.name:
            places = [arg["in"] if "in" in arg else copied.get(arg["s"]) for arg in step["args"]]
            if found is not None or None in places:
                return None
            found = tuple([task.inputs[place] for place in places if place is not None])
    return found
