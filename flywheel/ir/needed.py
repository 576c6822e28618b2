"""The version of the format that a program needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from flywheel.ir.compressed import Run
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import OPERATIONS
from flywheel.ir.version import IR_VERSION

_BEFORE: Final = "0.5.0"
_ADDED: Final = frozenset({"window", "cap", "frequencies", "w_offset"})
"""Params that IR_VERSION adds. It also adds `scale` where a step can be without."""


def needed_version(runs: Iterable[Run]) -> str:
    """The oldest version whose readers know what the runs' params mean. So a program that an older reader can run keeps
    its text."""
    found = {id(each.params): (run.op, each.params) for run in runs for each in run.tiles.stretches[:1]}
    return IR_VERSION if any(_is_new(op, params) for op, params in found.values()) else _BEFORE


def _is_new(op: InstructionKind, params: Mapping[str, Any]) -> bool:
    row = OPERATIONS[op]
    if not _ADDED.isdisjoint(params) or ("scale" in params and "scale" in row.options and row.alone != "scale"):
        return True
    steps = params["recipe"].steps if "recipe" in params else ()
    return any(_is_new(step.op, step.params) for step in steps)
