"""Pushes and sums, by which a program's GPUs exchange their results. Source: docs/ir.md, "Ranks"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from flywheel.ir.access import Region, tile, tile_rows
from flywheel.ir.compressed import Run
from flywheel.ir.dtype import DType
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import ATTENTIONS, operation_of
from flywheel.ir.recipe import Arg, Input, Scratch, Target, recipe_steps
from flywheel.ir.records import Buffer, Task
from flywheel.ir.version import ABI_MAX_ROWS

_K = InstructionKind
_COLUMNS: Final = ("n_off", "N_tile")


def is_push(task: Task) -> bool:
    """Whether the task only copies its own columns of its one input to its one output.

    Its params and its recipe must have passed their checks.
    """
    if task.op is not _K.FUSED or len(task.inputs) != 1 or len(task.outputs) != 1 or tile(task.params) is None:
        return False
    steps = recipe_steps(task)
    own = {name: task.params[name] for name in ("M_tile",) if name in task.params}
    return len(steps) == 1 and steps[0].op is _K.COPY and steps[0].params == own


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
    for step in recipe_steps(task):
        inherits = not any(name in step.params for name in _COLUMNS)
        for place, arg in enumerate(step.args):
            if arg == Input(operand):
                params = {**inherited, **step.params}
                regions += _surely(step.op, place, params, numel, own if inherits else None)
    return regions


def _surely(
    op: InstructionKind, place: int, params: Mapping[str, Any], numel: int, own: Sequence[Region] | None
) -> list[Region]:
    """The elements that one operation surely reads: all, some columns, or none where they depend on numbers or the
    position."""
    if op in ATTENTIONS:  # with an empty window it reads no queries
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
    copied: dict[Target, Arg] = {}
    found = None
    for step in recipe_steps(task):
        if step.op is _K.COPY:
            if not any(name in step.params for name in _COLUMNS):
                copied[step.out] = step.args[0]
        elif step.op is _K.ALLREDUCE_SHARD:
            sources = [copied.get(arg) if isinstance(arg, Scratch) else arg for arg in step.args]
            places = [each.number for each in sources if isinstance(each, Input)]
            if found is not None or len(places) < len(sources):
                return None
            found = tuple([task.inputs[place] for place in places])
    return found


def roundings(task: Task) -> tuple[DType, ...]:
    """The types that a sum's recipe rounds to, step by step, up to the sum."""
    found: list[DType] = []
    for step in recipe_steps(task):
        if step.op in (_K.COPY, _K.ALLREDUCE_SHARD):
            found.append(step.dtype)
        if step.op is _K.ALLREDUCE_SHARD:
            break
    return tuple(found)
