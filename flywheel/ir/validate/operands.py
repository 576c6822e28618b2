"""Checks operands against the table of operations: sizes, types, tiles and windows of one task or step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flywheel.ir.dtype import DType
from flywheel.ir.extents import Cache, Scope, value
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import FLOATS, Axis, Operand, Operation, operation_of
from flywheel.ir.records import Buffer

OperandFault = tuple[str, str]
"""(code, text) of a broken rule."""

Bound = list[tuple[Operand, Buffer]]


def operand_faults(
    op: InstructionKind, params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, is_step: bool = False
) -> Iterator[OperandFault]:
    """The faults of a task, or of a step of a recipe, by the table of operations.

    Required params are present and in range, and the number of inputs is right. A step makes the operation's `makes`.
    """
    row = operation_of(op, params)
    if row.output is None:
        return
    broken = list(_param_faults(row, params, inputs))
    bound = [(row.operand(place), buffer) for place, buffer in enumerate(inputs)]
    if is_step and row.makes is not None:
        bound.append((Operand("out", row.makes, row.output.dtypes), output))
    elif row.in_place is None:
        bound.append((row.output, output))
    broken += _type_faults(row, bound)
    if broken:
        yield from broken
        return
    scope = _scope(row, params, inputs, output)
    fault = next(_size_faults(bound, scope), None)
    if fault is not None:
        yield "operand-size", fault
        return
    if row.whole is not None:
        size, unit = row.whole
        if scope[size] % scope[unit]:
            first, buffer = bound[0]
            text = f"{_role(first, buffer)} has rows of {scope[size]}, not a multiple of {unit}={scope[unit]}"
            yield "operand-size", text
            return
    for operand, buffer in bound:
        past = _part_fault(operand, buffer, scope)
        if past is not None:
            yield past
            return


def sizes_of(op: InstructionKind, params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer) -> Scope:
    """Params and sizes by name, of a task without faults."""
    row = operation_of(op, params)
    scope = _scope(row, params, inputs, output)
    if row.output is not None:
        bound = [*((row.operand(place), buffer) for place, buffer in enumerate(inputs)), (row.output, output)]
        list(_size_faults(bound, scope))
    return scope


def _scope(row: Operation, params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer) -> Scope:
    numbers = {name: number for name, number in params.items() if type(number) is int}
    scope = {**dict(row.defaults), **numbers, "parts": len(inputs)}
    if row.tells_heads and not {"n_heads", "head_dim"} & scope.keys():
        heads = (inputs[0].numel - output.numel) // 2
        if heads > 0:
            scope["n_heads"] = heads
    return scope


def _param_faults(row: Operation, params: Mapping[str, Any], inputs: Sequence[Buffer]) -> Iterator[OperandFault]:
    if row.even is not None and params[row.even] % 2:
        yield "bad-param", f"{row.even}={params[row.even]} is odd"
    if row.multiple is not None:
        many, few = row.multiple
        if params[many] % params[few]:
            yield "bad-param", f"{many}={params[many]} is not a multiple of {few}={params[few]}"
    if row.codes is not None:
        name, dtypes = row.codes
        if params[name] not in dtypes:
            yield "bad-param", f"{name}={params[name]} is not the code of {_one_of(dtypes)}"
    given = [name for name in row.together if name in params]
    if given and len(given) < len(row.together):
        yield "bad-param", f"{given[0]} without all of {', '.join(row.together)}"
    if row.table is not None:
        yield from _table_faults(params, *row.table, row.without)
    if row.alone is not None and len(inputs) == 1 and row.alone not in params:
        yield "missing-param", f"one input needs param {row.alone}"
    yield from _axis_faults(row, params, inputs)


def _axis_faults(row: Operation, params: Mapping[str, Any], inputs: Sequence[Buffer]) -> Iterator[OperandFault]:
    if row.axis is not None and row.axis in params:
        rank, axis = len(inputs[0].shape), params[row.axis]
        if not -rank <= axis < rank:
            yield "bad-param", f"{row.axis}={axis} is not one of the {rank} dimensions of {_name(inputs[0])}"


def _table_faults(
    params: Mapping[str, Any], name: str, twice: str, without: Sequence[str]
) -> Iterator[OperandFault]:
    if 2 * len(params[name]) != params[twice]:
        yield "bad-param", f"{name} has {len(params[name])} numbers, not half of {twice}={params[twice]}"
    if beside := [other for other in without if other in params]:
        yield "bad-param", f"{beside[0]} beside {name}"


def _type_faults(row: Operation, bound: Bound) -> Iterator[OperandFault]:
    for operand, buffer in bound:
        if buffer.dtype not in operand.dtypes:
            yield "operand-type", f"{_role(operand, buffer)} is {buffer.dtype.name}, not {_one_of(operand.dtypes)}"
        if buffer.kind not in operand.kinds:
            yield "operand-type", f"{_role(operand, buffer)} is a {buffer.kind.name}, not {_one_of(operand.kinds)}"
    if row.keeps_bits and not converts(bound[0][1].dtype, bound[-1][1].dtype):
        types = f"{bound[0][1].dtype.name} to {bound[-1][1].dtype.name}"
        yield "operand-type", f"{types}: only floats change their type"


def converts(source: DType, target: DType) -> bool:
    """Whether elements of type `source` can be stored as `target`: floats are rounded, all others must have the same
    type."""
    return source is target or (source in FLOATS and target in FLOATS)


def _size_faults(bound: Bound, scope: Scope) -> Iterator[str]:
    """The faults of operands' sizes. Sizes that other operands decide are checked last. `scope` learns all sizes."""
    for operand, buffer in sorted(bound, key=lambda pair: pair[0].extent.unknown(scope) > 1):
        unknown = operand.extent.unknown(scope)
        fault = "tells not enough of its sizes" if unknown > 1 else operand.extent.fit(buffer, scope)
        if fault is not None:
            yield f"{_role(operand, buffer)} {fault}"


def _part_fault(operand: Operand, buffer: Buffer, scope: Scope) -> OperandFault | None:
    """The fault of the rows or columns that a tile, a window or an append names, where the operand does not have
    them."""
    part = operand.part
    if part is None or part.start is None:
        return None
    size, count = value(operand.extent.factors[0 if part.axis is Axis.ROWS else -1], scope), value(part.count, scope)
    assert size is not None
    assert count is not None
    end = scope[part.start] + count
    if end <= size:
        return None
    code = "kv-bounds" if isinstance(operand.extent, Cache) else "tile-bounds"
    return code, f"{part.start} + {part.count} = {end} is past the {size} {part.axis.value} of {_role(operand, buffer)}"


def _role(operand: Operand, buffer: Buffer) -> str:
    return f"{operand.name} ({_name(buffer)})"


def _name(buffer: Buffer) -> str:
    return f"{buffer.name} {list(buffer.shape)}"


def _one_of(members: frozenset[Any]) -> str:
    return " or ".join(member.name for member in sorted(members))
