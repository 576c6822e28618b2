"""Pushes and sums, by which a program's GPUs exchange their results. Source: docs/ir.md, "Ranks"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from flywheel.ir.access import Region, tile, tile_rows
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import operation_of
from flywheel.ir.records import Buffer, Task
from flywheel.ir.runs import Run
from flywheel.ir.version import ABI_MAX_ROWS

_K = InstructionKind
_COLUMNS: Final = ("n_off", "N_tile")


def is_push(task: Task) -> bool:
    """Whether the task only copies its own columns of its one input to its one output.

    Its params and its recipe must have passed their checks.
    """
    if task.op is not _K.FUSED or len(task.inputs) != 1 or len(task.outputs) != 1 or tile(task.params) is None:
        return False
    steps: Sequence[Mapping[str, Any]] = task.params["recipe"]["steps"]
    own = {name: task.params[name] for name in ("M_tile",) if name in task.params}
    return len(steps) == 1 and steps[0]["op"] == _K.COPY.name and steps[0].get("params", {}) == own


def pushed_counters(tasks: Iterable[Task | Run], buffers: Mapping[int, Buffer]) -> frozenset[int]:
    """Counters of tasks, or of runs, whose output is on another GPU."""
    return frozenset(
        task.out_counter for task in tasks for number in task.outputs if buffers[number].rank != task.rank
    )


def surely_read(task: Task, operand: int, numel: int, own: Sequence[Region]) -> list[Region]:
    """Elements of `inputs[operand]` that the task reads at any position of the program. The operand has `numel`
    elements.

    `own` are the columns that the task's params name, or those of all tiles that it stands for.
    """
    if task.op is not _K.FUSED:
        return _surely(task.op, operand, task.params, numel, None)
    inherited = {name: task.params[name] for name in _COLUMNS if name in task.params}
    regions: list[Region] = []
    for step in task.params["recipe"]["steps"]:
        named: Mapping[str, Any] = step.get("params", {})
        inherits = not any(name in named for name in _COLUMNS)
        for place, arg in enumerate(step["args"]):
            if arg.get("in") == operand:
                params = {**inherited, **named}
                regions += _surely(InstructionKind[step["op"]], place, params, numel, own if inherits else None)
    return regions


def _surely(
    op: InstructionKind, place: int, params: Mapping[str, Any], numel: int, own: Sequence[Region] | None
) -> list[Region]:
    """The elements that one operation surely reads: all, some columns, or none where they depend on numbers or the
    position."""
    if op is _K.ATTENTION_TILE:  # with an empty window it reads no queries
        return []
    if operation_of(op, params).operand(place).part is None:
        return [(0, numel)]
    columns = tile(params)
    if op is not _K.COPY or columns is None:
        return []
    return of_rows([columns] if own is None else own, tile_rows(params), numel) or []


def of_rows(columns: Sequence[Region], rows: int, numel: int) -> list[Region] | None:
    """The elements of `columns` in each of a buffer's rows; None for more rows than a step may have."""
    if rows > ABI_MAX_ROWS:
        return None
    width = numel // rows
    return [(row * width + start, row * width + min(end, width)) for row in range(rows) for start, end in columns]


def shards_added(task: Task) -> tuple[int, ...] | None:
    """The buffers that the task's ALLREDUCE_SHARD adds, in order.

    None where the task has no ALLREDUCE_SHARD, or where one adds anything but the task's inputs or its own columns of
    them.
    """
    if task.op is _K.ALLREDUCE_SHARD:
        return tuple(task.inputs)
    if task.op is not _K.FUSED:
        return None
    copied: dict[int, int] = {}
    found = None
    for step in task.params["recipe"]["steps"]:
        named: Mapping[str, Any] = step.get("params", {})
        if step["op"] == _K.COPY.name and "in" in step["args"][0] and type(step["out"]) is int:
            if any(name in named for name in _COLUMNS):
                continue
            copied[step["out"]] = step["args"][0]["in"]
        elif step["op"] == _K.ALLREDUCE_SHARD.name:
            places = [arg["in"] if "in" in arg else copied.get(arg["s"]) for arg in step["args"]]
            if found is not None or None in places:
                return None
            found = tuple([task.inputs[place] for place in places if place is not None])
    return found


def roundings(task: Task) -> tuple[str, ...]:
    """The types that a sum's recipe rounds to, step by step, up to the sum."""
    found: list[str] = []
    if task.op is _K.FUSED:
        for step in task.params["recipe"]["steps"]:
            if step["op"] in (_K.COPY.name, _K.ALLREDUCE_SHARD.name):
                found.append(step["out_dtype"])
            if step["op"] == _K.ALLREDUCE_SHARD.name:
                break
    return tuple(found)
