"""The bytes and operations of tasks, counted by the table of operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from flywheel.ir.dtype import BufferKind
from flywheel.ir.extents import Scope, value
from flywheel.ir.opcodes import INHERITED_PARAMS, TASK_PARAM_FIELDS, InstructionKind
from flywheel.ir.operations import Axis, Operand, operation_of
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.recipe import Arg, Input, Output, Target, recipe_steps
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.operands import sizes_of

_STREAMED: Final = (BufferKind.WEIGHT, BufferKind.CONST, BufferKind.KV_CACHE)
_PLACES: Final = frozenset({"n_off", "kv_start", "pos"})
"""Params that say which part a task works on, and not how much."""


@dataclass(frozen=True, slots=True)
class Work:
    """A task's work: bytes read of weights and caches, bytes read of other buffers, bytes written, and floating-point
    operations."""

    streamed: int = 0
    read: int = 0
    written: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.streamed + other.streamed,
            self.read + other.read,
            self.written + other.written,
            self.flops + other.flops,
        )


def work_of(task: Task, buffers: Mapping[int, Buffer]) -> Work:
    """The work of a task of a valid program, with `buffers` by id.

    A recipe's step counts what it reads, even if another step reads the same. A result that stays in scratch moves no
    bytes.
    """
    inputs, outputs = [buffers[each] for each in task.inputs], [buffers[each] for each in task.outputs]
    if task.op is InstructionKind.FUSED:
        return sum(_step_work(task, inputs, outputs), Work())
    if not outputs:
        return Work()
    sizes = sizes_of(task.op, task.params, inputs, outputs[0])
    row = operation_of(task.op, task.params)
    assert row.output is not None
    reads = [
        (_part_bytes(row.operand(place), buffer, sizes), buffer)
        for place, buffer in enumerate(inputs)
        if place != row.in_place
    ]
    return _summed(reads, _part_bytes(row.output, outputs[0], sizes), _flops(row.flops, sizes))


def works_of(program: MegakernelProgram) -> list[Work]:
    """The work of each task of a valid program. Tasks that differ only in their place are counted once."""
    buffers = {buffer.id: buffer for buffer in program.buffers}
    known: dict[tuple[object, ...], Work] = {}
    works = []
    for task in program.tasks:
        known_params = [(name, task.params[name]) for name in TASK_PARAM_FIELDS if name in task.params]
        alike = tuple(
            (buffers[each].kind, buffers[each].dtype, buffers[each].shape) for each in (*task.inputs, *task.outputs)
        )
        sizes = tuple(item for item in known_params if item[0] not in _PLACES)
        key = task.op, alike, sizes, task.params.get("recipe")
        if key not in known:
            known[key] = work_of(task, buffers)
        works.append(known[key])
    return works


def _step_work(task: Task, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Iterator[Work]:
    inherited = {name: task.params[name] for name in INHERITED_PARAMS & task.params.keys()}
    values: dict[Arg | Target, Buffer] = {Input(number): buffer for number, buffer in enumerate(inputs)}
    for index, step in enumerate(recipe_steps(task)):
        result = values[step.out] = step.result(index)
        params, args = {**inherited, **step.params}, [values[arg] for arg in step.args]
        sizes, row = sizes_of(step.op, params, args, result), operation_of(step.op, params)
        reads = [
            (_part_bytes(row.operand(place), values[arg], sizes), values[arg])
            for place, arg in enumerate(step.args)
            if isinstance(arg, Input) and place != row.in_place
        ]
        written = 0
        if isinstance(step.out, Output):
            output = outputs[step.out.number]
            appended = args[0].numel if row.in_place is not None else result.numel
            written = output.dtype.nbytes(appended)
        yield _summed(reads, written, _flops(row.flops, sizes))


def _summed(reads: Sequence[tuple[int, Buffer]], written: int, flops: int) -> Work:
    streamed = sum(nbytes for nbytes, buffer in reads if buffer.kind in _STREAMED)
    return Work(streamed, sum(nbytes for nbytes, _ in reads) - streamed, written, flops)


def _part_bytes(operand: Operand, buffer: Buffer, sizes: Scope) -> int:
    part = operand.part
    if part is None:
        return buffer.nbytes
    along = operand.extent.factors[0 if part.axis is Axis.ROWS else -1]
    count, whole = value(part.count, sizes), value(along, sizes)
    assert count is not None and whole, f"{operand.name} of a valid program has a size"
    return buffer.nbytes * count // whole


def _flops(factors: Sequence[str], sizes: Scope) -> int:
    return prod(value(factor, sizes) or 0 for factor in factors)
