"""Which columns of which buffers a task touches. Source: docs/ir.md, "Regions".

A region is a half-open range of columns: of the elements of a row for a matrix tile, of the flattened elements for
anything else, which is the same where the output has one row. A task with `n_off` and `N_tile` writes those columns of
`outputs[0]`; every other write, and every KV cache, counts whole. A COPY, or a FUSED input that the recipe uses only
through column-slicing COPY steps, is read in those columns alone; every other read counts whole. Where matrix tiles
write several rows of a buffer, only they have columns: everything else counts whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.records import Buffer, Task

Region = tuple[int, int]

MATRIX_OPS: Final = frozenset({InstructionKind.GEMV_TILE, InstructionKind.GEMM_TILE})

TILED_OPS: Final = MATRIX_OPS | {InstructionKind.FUSED}
"""Ops that write the columns `n_off`..`n_off + N_tile` of outputs[0] where their params name them."""

WHOLE: Final[Region] = (0, 1 << 62)
"""The region of an access that names no columns."""


def tile(params: Mapping[str, Any]) -> Region | None:
    """The columns that `n_off` and `N_tile` name, or None where they do not."""
    start, width = params.get("n_off"), params.get("N_tile")
    return (start, start + width) if type(start) is int and type(width) is int else None


def written_region(task: Task) -> Region | None:
    """Columns of outputs[0] that the task writes; None for all of them."""
    return tile(task.params) if task.op in TILED_OPS else None


def read_regions(task: Task, operand: int) -> list[Region] | None:
    """Columns of `inputs[operand]` that the task reads; None for all of them."""
    if task.op is InstructionKind.COPY:
        columns = tile(task.params)
        return None if columns is None else [columns]
    if task.op is not InstructionKind.FUSED:
        return None
    regions = []
    for step in task.params["recipe"]["steps"]:
        for arg in step["args"]:
            if arg.get("in") == operand:
                columns = tile({**_inherited(task), **step.get("params", {})})
                if step["op"] != "COPY" or columns is None:
                    return None
                regions.append(columns)
    return regions


def multi_row_buffers(tasks: Sequence[Task], buffers: Mapping[int, Buffer]) -> dict[int, int | None]:
    """Buffers that matrix tiles write over more than one row, with the number of rows, None where tiles disagree.

    Tasks must have passed the checks of operands and params.
    """
    deep = {number: buffer.numel // 2 for number, buffer in buffers.items()}
    rows: dict[int, int | None] = {}
    gemv, gemm = InstructionKind.GEMV_TILE, InstructionKind.GEMM_TILE
    for task in tasks:
        op = task.op
        if (op is gemv or op is gemm) and task.params["K"] <= deep[task.inputs[0]]:
            rows[task.outputs[0]] = None
    if rows:
        counts: dict[int, set[int]] = {number: set() for number in rows}
        for task in tasks:
            if task.op in MATRIX_OPS and task.outputs[0] in rows:
                counts[task.outputs[0]].add(max(1, buffers[task.inputs[0]].numel // task.params["K"]))
        rows = {number: next(iter(found)) if len(found) == 1 else None for number, found in counts.items()}
    return rows


def _inherited(task: Task) -> dict[str, Any]:
    return {name: task.params[name] for name in ("n_off", "N_tile") if name in task.params}
