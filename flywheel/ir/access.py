"""Which columns of which buffers a task touches. Source: docs/ir.md, "Regions".

A region is a half-open range of columns (elements of the flattened output row). A task with `n_off` and `N_tile` writes those
columns of `outputs[0]`; every other write, and every KV cache, counts whole. A FUSED input that the recipe uses only through
column-slicing COPY steps is read in those columns alone; every other read counts whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.records import Task

Region = tuple[int, int]

TILED_OPS: Final = frozenset(
    {
        InstructionKind.GEMV_TILE,
        InstructionKind.GEMM_TILE,
        InstructionKind.FUSED,
    }
)
"""Ops that write the columns `n_off`..`n_off + N_tile` of outputs[0] where their params name them."""


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


def _inherited(task: Task) -> dict[str, Any]:
    return {name: task.params[name] for name in ("n_off", "N_tile") if name in task.params}
