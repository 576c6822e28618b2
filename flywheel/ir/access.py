"""The columns of each buffer that a task reads and writes. Source: docs/ir.md, "Regions".

A region is a half-open range of columns. For a matrix tile it counts the elements of a row. For any other task it
counts the flattened elements, which is the same where the output has one row.

A task with `n_off` and `N_tile` writes those columns of `outputs[0]`. Every other write, and every KV cache, counts as
a whole. A FUSED task with `M_tile` above 1 is a matrix tile over that many rows.

Two kinds of reads count by columns: that of a COPY, and that of a FUSED input which the recipe uses only through
column-slicing COPY steps. Every other read counts as a whole, and so does a COPY of columns of several rows. Where
tiles write several rows of a buffer, only these tiles have columns, and all else counts as a whole. A task with
`kv_rows` PAST does not read the rows of a KV cache that an append at or behind its window writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from flywheel.ir.opcodes import InstructionKind, KvRows
from flywheel.ir.operations import APPENDS, OPERATIONS, PRODUCTS, TILES
from flywheel.ir.recipe import Input, Output, Recipe, recipe_steps
from flywheel.ir.records import Buffer, Task
from flywheel.ir.window import first_row

Region = tuple[int, int]

TILED_OPS: Final = TILES | {InstructionKind.FUSED}
"""Ops that write the columns `n_off`..`n_off + N_tile` of outputs[0] if their params name them."""

WHOLE: Final[Region] = (0, 1 << 62)
"""The region of an access that names no columns."""

_WINDOWS: Final = {
    op: [part is not None and part.start == "kv_start" for part in (each.part for each in row.inputs)]
    for op, row in OPERATIONS.items()
}
"""Operation -> for each operand, whether its rows are those of the window that `kv_start` begins."""


def tile(params: Mapping[str, Any]) -> Region | None:
    """The columns that `n_off` and `N_tile` name; None where they name none."""
    start, width = params.get("n_off"), params.get("N_tile")
    return (start, start + width) if type(start) is int and type(width) is int else None


def tile_rows(params: Mapping[str, Any]) -> int:
    """Rows of a FUSED task's tile, or of a COPY of columns: `M_tile`, or 1."""
    rows: int = params.get("M_tile", 1) if tile(params) is not None else 1
    return rows


def written_region(task: Task) -> Region | None:
    """Columns of outputs[0] that the task writes; None for all of them."""
    return tile(task.params) if task.op in TILED_OPS else None


def read_regions(task: Task, operand: int) -> list[Region] | None:
    """Columns of `inputs[operand]` that the task reads; None for all of them."""
    if task.op is InstructionKind.COPY:
        columns = _copied(task.params)
        return None if columns is None else [columns]
    if task.op is not InstructionKind.FUSED:
        return None
    regions = []
    for step in recipe_steps(task):
        for arg in step.args:
            if arg == Input(operand):
                columns = _copied({**_inherited(task), **step.params})
                if step.op is not InstructionKind.COPY or columns is None:
                    return None
                regions.append(columns)
    return regions


def appends_behind(writer: Task, reader: Task, operand: int) -> bool:
    """Whether `writer` writes only rows of a KV cache behind all that `reader` reads, at any position of the program.

    The cache is operand `operand` of `reader`.
    """
    return writes_from(writer, reader.inputs[operand], past_rows_end(reader, operand))


def writes_from(writer: Task, cache: int, end: int | None) -> bool:
    """Whether all rows that `writer` writes of a KV cache are at `end` or behind it; False where `end` is None."""
    if end is None:
        return False
    row = first_row_written(writer, cache)
    return row is not None and end <= row


def first_row_written(writer: Task, cache: int) -> int | None:
    """The first row of a cache that the task may write; None where it may be any row."""
    return _appended_row(writer, writer.outputs.index(cache))


def multi_row_buffers(tasks: Sequence[Task], buffers: Mapping[int, Buffer]) -> dict[int, int | None]:
    """Buffers of which tiles write several rows -> the number of rows, or None where tiles disagree.

    Tasks must have passed the checks of operands and params.
    """
    deep: dict[int, int] = {}  # the longest row for which an input has several rows
    rows: dict[int, int | None] = {}
    fused = InstructionKind.FUSED
    for task in tasks:
        op = task.op
        if op in PRODUCTS:
            x = task.inputs[0]
            if x not in deep:
                deep[x] = buffers[x].numel // 2
            several = task.params["K"] <= deep[x]
        else:
            several = op is fused and "M_tile" in task.params and tile_rows(task.params) > 1
        if several:
            rows[task.outputs[0]] = None
    if rows:
        counts: dict[int, set[int]] = {number: set() for number in rows}
        for task in tasks:
            if task.outputs and task.outputs[0] in rows:
                if task.op in PRODUCTS:
                    counts[task.outputs[0]].add(max(1, buffers[task.inputs[0]].numel // task.params["K"]))
                elif task.op is fused and tile_rows(task.params) > 1:
                    counts[task.outputs[0]].add(tile_rows(task.params))
        rows = {number: next(iter(found)) if len(found) == 1 else None for number, found in counts.items()}
    return rows


def regions_united(columns: Iterable[Region]) -> list[Region]:
    """The same elements as the fewest intervals, sorted."""
    united: list[Region] = []
    for start, end in sorted(columns):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def uncovered(columns: Sequence[Region], edge: int, stop: int) -> list[Region]:
    """The parts of `edge`..`stop` outside of sorted, disjoint `columns`."""
    gaps = []
    for start, end in columns:
        if end > edge and start < stop:
            if start > edge:
                gaps.append((edge, start))
            edge = end
    if edge < stop:
        gaps.append((edge, stop))
    return gaps


def _copied(params: Mapping[str, Any]) -> Region | None:
    """The columns that a COPY with `params` reads; None for all, and for columns of several rows."""
    return tile(params) if tile_rows(params) == 1 else None


def _inherited(task: Task) -> dict[str, Any]:
    return {name: task.params[name] for name in ("n_off", "N_tile") if name in task.params}


def past_rows_end(task: Task, operand: int) -> int | None:
    """The row before which a task with `kv_rows` PAST stops reading the operand; None where it may read any row.

    It is 0 for an empty window. At any position of the program, the task reads no row from there on.
    """
    params = task.params
    if params.get("kv_rows") != KvRows.PAST:
        return None
    fused = task.op is InstructionKind.FUSED
    if not (_reads_windows(params["recipe"], operand) if fused else reads_window(task.op, operand)):
        return None
    end: int = first_row(params) + params["kv_start"] + params["kv_len"]
    return end if params["kv_len"] > 0 else 0


@lru_cache(maxsize=1 << 12)
def _reads_windows(recipe: Recipe, operand: int) -> bool:
    """Whether all steps read of an input the rows of the task's window alone."""
    return all(
        reads_window(step.op, place)
        for step in recipe.steps
        for place, arg in enumerate(step.args)
        if arg == Input(operand)
    )


def _appended_row(task: Task, output: int) -> int | None:
    """The first row of a cache that the task may write as `outputs[output]`; None where it may be any row."""
    if task.op in APPENDS:
        pos: int = task.params["pos"]
        return pos
    rows = _appended(task.params["recipe"], output) if task.op is InstructionKind.FUSED else None
    return min([task.params["pos"] if row is None else row for row in rows]) if rows else None


@lru_cache(maxsize=1 << 12)
def _appended(recipe: Recipe, output: int) -> tuple[int | None, ...]:
    """The rows at which steps append to an output, None for the task's own; empty where a step writes other rows."""
    steps = [step for step in recipe.steps if step.out == Output(output)]
    if not all(step.op in APPENDS for step in steps):
        return ()
    return tuple([int(step.params["pos"]) if "pos" in step.params else None for step in steps])


def reads_window(op: InstructionKind, place: int) -> bool:
    """Whether an operation reads of the operand at a place the rows of the task's window alone."""
    windows = _WINDOWS[op]
    return windows[min(place, len(windows) - 1)]
