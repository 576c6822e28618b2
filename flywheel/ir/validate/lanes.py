"""Three rules of positions.

By the first, tasks that share a cache move together, so each sequence may have a position of its own. By the second,
windows move with the positions. By the third, a launch may put several tokens of a sequence at consecutive rows of one
cache.

Tasks append one row each, that of their lane, and attend to rows up to that of their lane. Then the rows that a launch
at position p writes are p, p + 1.., a lane each, wherever p is, and the rules of races see them as cells of the cache
(`flywheel.ir.lanes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flywheel.ir.access import reads_window
from flywheel.ir.compressed import as_runs, brief_runs, task_of
from flywheel.ir.dtype import BufferKind
from flywheel.ir.lanes import lane_of, lanes_of_caches
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import APPENDS
from flywheel.ir.positions import last_position
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.recipe import Arg, Input, recipe_steps
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.findings import Findings
from flywheel.ir.window import first_row


def check_lanes(program: MegakernelProgram, findings: Findings) -> None:
    """Every task that touches a cache of several lanes appends one row to it, or attends to rows up to its lane's."""
    buffers = {buffer.id: buffer for buffer in program.buffers}
    every = {number: buffer for number, buffer in buffers.items() if buffer.kind is BufferKind.KV_CACHE}
    laned = lanes_of_caches(list(tasks_with(program, every)), buffers)
    caches = {number: buffers[number] for number in laned}
    if not caches:
        return
    bases: dict[int, tuple[int, Task]] = {}
    readers: list[tuple[Task, int]] = []
    for task in tasks_with(program, caches):
        for number in dict.fromkeys(each for each in (*task.inputs, *task.outputs) if each in caches):
            if number in task.outputs:
                fault = _append_fault(task, number, buffers) or _base_fault(task, bases.setdefault(number, _base(task)))
            else:
                fault = _window_fault(task, number)
                readers.append((task, number))
            if fault is not None:
                _report(task, caches[number], fault, findings)
                if findings.full:
                    return
    for task, number in () if findings.errors else readers:
        fault = None if number not in bases else _end_fault(task, bases[number][0])
        if fault is not None:
            _report(task, caches[number], fault, findings)
            if findings.full:
                return


def _report(task: Task, cache: Buffer, fault: str, findings: Findings) -> None:
    findings.error("kv-lane", f"task {task.id} ({task.label}): cache {cache.id} ({cache.name}): {fault}", task.id)


@dataclass(frozen=True, slots=True)
class _CacheUse:
    """A step that reads a cache as its operand `place`."""

    op: InstructionKind
    place: int
    params: Mapping[str, Any]
    args: tuple[Arg, ...]


def _uses(task: Task, cache: int) -> Iterator[_CacheUse]:
    """How the steps of a task read a cache; a plain operation is one step."""
    if task.op is not InstructionKind.FUSED:
        args = tuple(map(Input, range(len(task.inputs))))
        yield from [_CacheUse(task.op, place, {}, args) for place, number in enumerate(task.inputs) if number == cache]
    for step in recipe_steps(task):
        for place, arg in enumerate(step.args):
            if isinstance(arg, Input) and task.inputs[arg.number] == cache:
                yield _CacheUse(step.op, place, step.params, step.args)


def _append_fault(task: Task, cache: int, buffers: Mapping[int, Buffer]) -> str | None:
    """What is wrong with a task that writes a cache, or None."""
    uses = list(_uses(task, cache))
    if len(uses) != 1 or uses[0].op not in APPENDS:
        return "is written by something else than one KV_APPEND, or read by what appends to it"
    (use,) = uses
    if "pos" in use.params or "pos" not in task.params or "kv_rows" in task.params:
        return "is appended to at a position that is not the task's own"
    rows, row = _numel(use.args[0], task, buffers), buffers[cache].numel // buffers[cache].shape[0]
    if rows != row:
        return f"an append of {rows} elements, where a row has {row}; a lane appends one"
    return None


def _numel(arg: Arg, task: Task, buffers: Mapping[int, Buffer]) -> int:
    if isinstance(arg, Input):
        return buffers[task.inputs[arg.number]].numel
    return next(step.numel for step in recipe_steps(task) if step.out == arg)


def _base(task: Task) -> tuple[int, Task]:
    """Where the lane 0 of a task that appends stands."""
    return task.params["pos"] - lane_of(task) if "pos" in task.params else 0, task


def _base_fault(task: Task, first: tuple[int, Task]) -> str | None:
    (base, _), (known, other) = _base(task), first
    if base != known or base < 0:
        lanes = f"lane {lane_of(task)} at row {task.params['pos']}"
        return f"{lanes}, where task {other.id} ({other.label}) has lane {lane_of(other)} at {other.params['pos']}"
    return None


def _window_fault(task: Task, cache: int) -> str | None:
    """What is wrong with how a task that does not write a cache reads it, or None."""
    for use in _uses(task, cache):
        if not reads_window(use.op, use.place) or {"kv_start", "kv_len"} & use.params.keys():
            return f"is read by {use.op.name} otherwise than in the task's window"
    if "kv_rows" in task.params:
        return "is read by kv_rows, which says nothing of lanes"
    if "kv_len" not in task.params or "kv_start" not in task.params:
        return "is read in no window"
    return None


def _end_fault(task: Task, base: int) -> str | None:
    end, own = first_row(task.params) + task.params["kv_start"] + task.params["kv_len"], base + lane_of(task)
    if task.params["kv_len"] and end > own + 1:
        return f"lane {lane_of(task)} stands at row {own}, and reads up to row {end - 1}"
    return None


def _check_windows(program: MegakernelProgram, windowed: Sequence[Task], findings: Findings) -> None:
    """Check that every task with a `window` stands where the program was lowered for.

    Then its rows are furthest behind there, and its bounds hold at every position that a launch can have.
    """
    runs, _ = brief_runs(program)
    last = last_position(each.params for run in runs for each in run.tiles.stretches)
    for task in windowed:
        if last_position([task.params]) != last:
            text = f"pos={task.params['pos']} with a window, in a program that stands at position {last}"
            findings.error("kv-window", f"task {task.id} ({task.label}): {text}", task.id)
            if findings.full:
                return


def check_sequences(program: MegakernelProgram, findings: Findings) -> None:
    """Check that all tasks with `pos` or `kv_len` that touch one KV cache name one `sequence`, and windows' positions.

    Then the rows of a cache that tasks touch are those of a program whose sequences are all at that position, which the
    other rules prove. No other buffer has rows that move.
    """
    caches = {buffer.id: buffer.name for buffer in program.buffers if buffer.kind is BufferKind.KV_CACHE}
    first: dict[int, tuple[int, Task]] = {}
    windowed: list[Task] = []
    for task in tasks_with(program, caches):
        params = task.params
        if "pos" not in params and "kv_len" not in params:
            continue
        if "window" in params:
            windowed.append(task)
        sequence = params.get("sequence", 0)
        for number in {*task.inputs, *task.outputs} & caches.keys():
            known, other = first.setdefault(number, (sequence, task))
            if known != sequence:
                findings.error(
                    "kv-sequence",
                    f"task {task.id} ({task.label}): sequence {sequence} with cache {number} ({caches[number]}), of "
                    f"which task {other.id} ({other.label}) is sequence {known}",
                    task.id,
                )
                if findings.full:
                    return
    if windowed:
        _check_windows(program, windowed, findings)


def tasks_with(program: MegakernelProgram, caches: Mapping[int, Any]) -> Iterator[Task]:
    """Tasks that touch these caches; of a run, one a stretch of tiles."""
    tasks = as_runs(program)
    for run, place in tasks.placed:
        if caches.keys().isdisjoint(run.inputs) and caches.keys().isdisjoint(run.outputs):
            continue
        for stretch in run.tiles.stretches:
            yield task_of(run, stretch, tasks.ids[place], 0)
            place += stretch.n_tiles
