"""Checks the operands of a task and of each step of its recipe. Params and grammar have passed their checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flywheel.ir.access import tile, tile_rows
from flywheel.ir.dtype import BufferKind
from flywheel.ir.opcodes import INHERITED_PARAMS, InstructionKind
from flywheel.ir.recipe import FINAL, Arg, Input, Output, Target, recipe_steps
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.operands import Fault, converts, operand_faults


def bound_faults(
    task: Task, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> Iterator[Fault]:
    """The faults of a task's operands by the table of operations."""
    if task.op is InstructionKind.FUSED:
        yield from _recipe_faults(task, inputs, outputs)
    elif outputs:
        yield from operand_faults(task.op, task.params, inputs, outputs[0])


def _recipe_faults(task: Task, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Iterator[Fault]:
    inherited = {name: task.params[name] for name in INHERITED_PARAMS & task.params.keys()}
    values: dict[Arg | Target, Buffer] = {Input(number): buffer for number, buffer in enumerate(inputs)}
    for index, step in enumerate(recipe_steps(task)):
        result = values[step.out] = step.result(index)
        params, args = {**inherited, **step.params}, [values[arg] for arg in step.args]
        faults = list(operand_faults(step.op, params, args, result, is_step=True))
        if isinstance(step.out, Output) and step.op is not InstructionKind.KV_APPEND:
            columns = tile(task.params) if step.out == FINAL else None
            faults += _output_faults(result, outputs[step.out.number], columns, tile_rows(task.params))
        for code, text in faults:
            yield code, f"step {index}: {step.op.name}: {text}"


def _output_faults(result: Buffer, output: Buffer, columns: tuple[int, int] | None, rows: int) -> Iterator[Fault]:
    """Faults of a recipe's result, which must fill exactly the columns that count as written, in each of `rows`
    rows."""
    made, name = result.numel, f"{output.name} {list(output.shape)}"
    if not converts(result.dtype, output.dtype):
        yield "operand-type", f"makes {result.dtype.name} for {name}, which is {output.dtype.name}"
    if columns is None or output.kind is BufferKind.KV_CACHE:
        if made != output.numel:
            yield "operand-size", f"makes {made} elements for the {output.numel} of {name}"
        return
    if output.numel % rows:
        yield "tile-bounds", f"M_tile={rows} does not divide the {output.numel} elements of {name}"
    if columns[1] > output.numel // rows:
        yield "tile-bounds", f"n_off + N_tile = {columns[1]} is past the {output.numel // rows} columns of {name}"
    wanted = (columns[1] - columns[0]) * rows
    if made != wanted:
        yield "operand-size", f"makes {made} elements for a tile of {wanted} of {name}"
