"""Move a program along its sequences. Between launches, only `pos`, `kv_start` and `kv_len` change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flywheel.errors import ConfigError
from flywheel.ir.opcodes import KvRows
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.recipe import recipe_steps
from flywheel.ir.records import Task
from flywheel.ir.window import rows_in_sight

_MOVING = frozenset({"pos", "kv_len"})


def at_position(program: MegakernelProgram, pos: int | Sequence[int]) -> MegakernelProgram:
    """`program`, lowered for a whole context, patched so that its new tokens stand at `pos`: all of them, or that of
    each sequence at a position of its own. A task with `lane` stands so far behind.

    `pos` is one position for all sequences, or one for each. What a task reads of a cache shrinks to the rows up to
    `pos`; with `kv_rows`, to the rows before it or to that row. With `window`, it moves along. Rows that begin behind
    `pos` become none. Raises ConfigError where a
    position is behind the one that the program was lowered for, where a sequence has none, and where a recipe fixes a
    position that must move.
    """
    last = last_position(task.params for task in program.tasks)
    if last is None:
        raise ConfigError("program: no task has the param pos, so the program has no position")
    for each in [pos] if isinstance(pos, int) else pos:
        if not 0 <= each <= last:
            raise ConfigError(f"position {each} is not in 0..{last}, the positions of this program")
    moved: dict[int, Mapping[str, Any]] = {}  # by identity, since equal layers share params
    tasks = []
    for task in program.tasks:
        identity = id(task.params)
        if identity not in moved:
            moved[identity] = _moved(task, pos)
        params = moved[identity]
        tasks.append(task if params is task.params else replace(task, params=params))
    return replace(program, tasks=tuple(tasks))


def last_position(params: Iterable[Mapping[str, Any]]) -> int | None:
    """The position, that of lane 0, for which tasks with such params were lowered; None where none has one."""
    return max((each["pos"] - each.get("lane", 0) for each in params if "pos" in each), default=None)


def _moved(task: Task, pos: int | Sequence[int]) -> Mapping[str, Any]:
    params = task.params
    for step in recipe_steps(task):
        fixed = sorted(_MOVING & step.params.keys())
        if fixed:
            raise ConfigError(f"task {task.id} ({task.label}): its recipe fixes {fixed[0]}, which must move")
    if _MOVING.isdisjoint(params):
        return params
    own = _own(task, pos)
    changed = {}
    if "pos" in params:
        changed["pos"] = own
    if "kv_len" in params:
        changed |= _moved_rows(params, own)
    return {**params, **changed}


def _own(task: Task, pos: int | Sequence[int]) -> int:
    """The position of a task's token."""
    lane: int = task.params.get("lane", 0)
    if isinstance(pos, int):
        return pos + lane
    sequence: int = task.params.get("sequence", 0)
    if sequence >= len(pos):
        raise ConfigError(f"task {task.id} ({task.label}): sequence {sequence} is not in 0..{len(pos) - 1}")
    return pos[sequence] + lane


def _moved_rows(params: Mapping[str, Any], pos: int) -> dict[str, int]:
    if params.get("kv_rows") == KvRows.NEW:
        return {"kv_start": pos, "kv_len": 1}
    seen = rows_in_sight(params, pos)
    end = seen - 1 if params.get("kv_rows") == KvRows.PAST else seen
    return {"kv_len": min(params["kv_len"], max(0, end - params.get("kv_start", 0)))}
