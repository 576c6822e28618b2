"""Moving a program along the sequence: only `pos`, `kv_start` and `kv_len` change between launches."""

from __future__ import annotations

from dataclasses import replace

from flywheel.errors import ConfigError
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Task


def at_position(program: MegakernelProgram, pos: int) -> MegakernelProgram:
    """`program`, lowered for a whole context, patched so that its new token stands at `pos`.

    KV windows shrink to the rows up to `pos`; one that starts behind it becomes empty. Raises ConfigError where `pos` is
    behind the position that the program was lowered for.
    """
    last = max((task.params["pos"] for task in program.tasks if "pos" in task.params), default=None)
    if last is None or not 0 <= pos <= last:
        raise ConfigError(f"position {pos} is not in 0..{last}, the positions of this program")
    return replace(program, tasks=tuple(_patched(task, pos) for task in program.tasks))


def _patched(task: Task, pos: int) -> Task:
    params = task.params
    if task.op not in (InstructionKind.KV_APPEND, InstructionKind.ATTENTION_TILE, InstructionKind.FUSED):
        return task
    changed = {}
    if "pos" in params:
        changed["pos"] = pos
    if "kv_len" in params:
        changed["kv_len"] = min(params["kv_len"], max(0, pos + 1 - params["kv_start"]))
    return replace(task, params={**params, **changed}) if changed else task
