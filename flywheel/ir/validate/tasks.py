"""Checks of each task alone: operands, params, bounds.

Decisions are kept per shared record and per shape of the operands, so that the tiles of a projection and the layers of
a model cost little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from marshal import dumps, loads
from typing import Any, Final

from flywheel.ir.access import tile, tile_rows
from flywheel.ir.dtype import READONLY_KINDS, BufferKind, DType
from flywheel.ir.opcodes import INHERITED_PARAMS, TASK_PARAM_FIELDS, InstructionKind
from flywheel.ir.operations import APPENDS, OPERATIONS
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.recipe import FINAL, Arg, Input, Output, Recipe, Target, recipe_steps
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.findings import Finding, Findings
from flywheel.ir.validate.operands import OperandFault, converts, operand_faults
from flywheel.ir.validate.params import check_params
from flywheel.ir.validate.recipe import check_recipe
from flywheel.ir.version import ABI_MAX_INPUTS, ABI_MAX_OUTPUTS, ABI_MAX_WAITS
from flywheel.ir.window import in_rows

_ARITY: Final = {op: (*row.arity, *row.n_outputs) for op, row in OPERATIONS.items()}
"""(least inputs, most inputs, least outputs, most outputs)."""

_Look = tuple[BufferKind, DType, tuple[int, ...]]

_IN_PLACE: Final = {op: row.in_place for op, row in OPERATIONS.items()}


def check_tasks(program: MegakernelProgram, findings: Findings) -> None:
    """Check arity, references, params, recipes and bounds of every task."""
    buffers = {buffer.id: buffer for buffer in program.buffers}
    tasks = program.tasks
    _check_nibbles(program.buffers, findings)
    _check_placement(program, findings)
    _check_wait_counts(tasks, findings)
    # Three short loops with zip, in C, instead of one long loop over every task.
    keys = list(
        zip(
            [id(task.op) for task in tasks],
            [id(task.inputs) for task in tasks],
            [id(task.outputs) for task in tasks],
            strict=True,
        )
    )
    distinct = dict(zip(keys, tasks, strict=True))
    for task in distinct.values():
        _check_operands(task, buffers, findings)
        if findings.errors and findings.full:
            return
    params = zip([id(task.op) for task in tasks], [id(task.params) for task in tasks], strict=True)
    for task in dict(zip(params, tasks, strict=True)).values():
        check_params(task, TASK_PARAM_FIELDS, OPERATIONS[task.op].params, findings)
        if findings.errors and findings.full:
            return
    if not findings.errors:
        shape_of = _operand_shapes(distinct, buffers)
        decided = zip([id(task.params) for task in tasks], map(shape_of.__getitem__, keys), strict=True)
        _check_bounds(dict(zip(decided, tasks, strict=True)), buffers, findings)


def task_findings(task: Task, buffers: Mapping[int, Buffer]) -> list[Finding]:
    """The findings of one task alone, as `check_tasks` reports them."""
    findings = Findings(strict=True)
    _check_operands(task, buffers, findings)
    if not findings.errors:
        check_params(task, TASK_PARAM_FIELDS, OPERATIONS[task.op].params, findings)
    if not findings.errors:
        _check_task_bounds(task, buffers, findings)
    return findings.errors


def _check_nibbles(buffers: Sequence[Buffer], findings: Findings) -> None:
    """Check that rows of I4 end at a byte."""
    for buffer in buffers:
        if buffer.dtype is DType.I4 and buffer.shape[-1] % 2:
            text = f"I4 rows of an odd number of elements, {buffer.shape[-1]}"
            findings.error("bad-shape", f"buffer {buffer.id} ({buffer.name}): {text}")
            if findings.full:
                return


def _check_placement(program: MegakernelProgram, findings: Findings) -> None:
    num_sms = program.target.num_sms if program.target is not None else None
    used = {task.sm for task in program.tasks} - {None}
    wrong = {sm for sm in used if sm is not None and not (sm >= 0 and (num_sms is None or sm < num_sms))}
    if not wrong:
        return
    bound = "" if num_sms is None else f"..{num_sms - 1}"
    for task in program.tasks:
        if task.sm in wrong:
            findings.error("sm-range", f"task {task.id} ({task.label}): sm={task.sm} is not in 0{bound}", task.id)
            if findings.full:
                return


def _check_wait_counts(tasks: Sequence[Task], findings: Findings) -> None:
    if all(len(waits) <= ABI_MAX_WAITS for waits in {id(task.waits): task.waits for task in tasks}.values()):
        return
    for task in tasks:
        if len(task.waits) > ABI_MAX_WAITS:
            found = f"{len(task.waits)} waits, at most {ABI_MAX_WAITS}"
            findings.error("abi-limit", f"task {task.id} ({task.label}): {found}", task.id)
            if findings.full:
                return


def _operand_shapes(
    distinct: Mapping[tuple[int, int, int], Task], buffers: Mapping[int, Buffer]
) -> dict[tuple[int, int, int], int]:
    """A number for each key of `distinct`; equal for tasks whose bounds differ by their params alone."""
    numbers: dict[tuple[object, ...], int] = {}
    looks = {
        number: numbers.setdefault((buffer.kind, buffer.dtype, *buffer.shape), len(numbers))
        for number, buffer in buffers.items()
    }
    result = {}
    for key, task in distinct.items():
        signature = (
            int(task.op),
            *[looks[number] for number in task.inputs],
            -1,
            *[looks[number] for number in task.outputs],
            # An append is in place only if its output is its input.
            *[(slot, task.inputs.index(number)) for slot, number in enumerate(task.outputs) if number in task.inputs],
        )
        result[key] = numbers.setdefault(signature, len(numbers))
    return result


def _check_bounds(distinct: Mapping[tuple[int, int], Task], buffers: Mapping[int, Buffer], findings: Findings) -> None:
    """Check the bounds of tasks, by (params, operand shapes).

    Of tiles that differ by `n_off` alone, the last one reaches furthest. The others are checked only if it has a fault.
    """
    alike: dict[tuple[object, ...], list[Task]] = {}
    for (_, shape), task in distinct.items():
        params = task.params
        rest = tuple([item for item in params.items() if item[0] in TASK_PARAM_FIELDS and item[0] != "n_off"])
        key = (int(task.op), shape, _identity(params.get("recipe")), "n_off" in params, rest)
        alike.setdefault(key, []).append(task)
    for tiles in alike.values():
        before, last = len(findings.errors), max(tiles, key=_first_column)
        if _is_known_to_keep_bounds(last, buffers):
            continue
        _check_task_bounds(last, buffers, findings)
        if len(findings.errors) > before:
            del findings.errors[before:]
            for task in tiles:
                _check_task_bounds(task, buffers, findings)
                if findings.full:
                    return


def _is_known_to_keep_bounds(task: Task, buffers: Mapping[int, Buffer]) -> bool:
    """Whether a like task, perhaps of another program, was found to be without faults."""
    try:
        plain = dumps({name: value for name, value in task.params.items() if name != "recipe"}, 2)
    except ValueError:  # not of plain values
        return False
    recipe = task.params.get("recipe")
    if "recipe" in task.params and type(recipe) is not Recipe:
        return False
    operands = (*task.inputs, *task.outputs)
    looks = tuple([(b.kind, b.dtype, tuple(b.shape)) for b in map(buffers.__getitem__, operands)])
    same = tuple([operands.index(number) for number in operands])
    return _keeps_bounds(task.op, plain, recipe, looks, same, len(task.inputs))


@lru_cache(maxsize=1 << 14)
def _keeps_bounds(
    op: InstructionKind,
    plain: bytes,
    recipe: Recipe | None,
    looks: tuple[_Look, ...],
    same: tuple[int, ...],
    n_inputs: int,
) -> bool:
    """Whether the bounds of a task with such params and operands are without faults. Programs of one search share most
    of them."""
    buffers = {number: Buffer(number, "", *look) for number, look in zip(same, looks, strict=True)}
    findings = Findings(strict=True)
    params = loads(plain) | ({} if recipe is None else {"recipe": recipe})
    _check_task_bounds(Task(0, op, same[:n_inputs], same[n_inputs:], 0, (), params), buffers, findings)
    return not findings.errors and not findings.warnings


def _identity(recipe: object) -> object:
    """The recipe; for anything else, which may have no hash, the object's own number."""
    return recipe if type(recipe) is Recipe else id(recipe)


def _first_column(task: Task) -> int:
    column: int = task.params.get("n_off", 0)
    return column


def _check_task_bounds(task: Task, buffers: Mapping[int, Buffer], findings: Findings) -> None:
    if task.op is InstructionKind.FUSED and not check_recipe(task, findings):
        return
    inputs = [buffers[number] for number in task.inputs]
    outputs = [buffers[number] for number in task.outputs]
    for code, text in bound_faults(task, inputs, outputs):
        findings.error(code, f"{_name(task)}: {text}", task.id)


def _check_operands(task: Task, buffers: Mapping[int, Buffer], findings: Findings) -> None:
    before = len(findings.errors)
    _check_arity(task, findings)
    for number in (*task.inputs, *task.outputs):
        if number not in buffers:
            role = "input" if number in task.inputs else "output"
            findings.error("unknown-buffer", f"{_name(task)}: {role} {number} names no buffer", task.id)
            return
    for number in task.outputs:
        if buffers[number].kind in READONLY_KINDS:
            what = f"buffer {number} ({buffers[number].name}), a {buffers[number].kind.name}"
            findings.error("readonly-write", f"{_name(task)} writes {what}", task.id)
    place = _IN_PLACE[task.op]
    if place is not None and len(findings.errors) == before and task.inputs[place] != task.outputs[0]:
        what = f"buffer {task.inputs[place]} as its cache and writes buffer {task.outputs[0]}, not in place"
        findings.error("kv-target", f"{_name(task)} takes {what}", task.id)


def _check_arity(task: Task, findings: Findings) -> None:
    least, most, least_outputs, most_outputs = _ARITY[task.op]
    n_inputs, n_outputs = len(task.inputs), len(task.outputs)
    if not least <= n_inputs <= most:
        code = "abi-limit" if n_inputs > ABI_MAX_INPUTS else "arity"
        findings.error(code, f"{_name(task)} has {n_inputs} inputs, not {least}..{most}", task.id)
    if not least_outputs <= n_outputs <= most_outputs:
        code = "abi-limit" if n_outputs > ABI_MAX_OUTPUTS else "arity"
        findings.error(code, f"{_name(task)} has {n_outputs} outputs, not {least_outputs}..{most_outputs}", task.id)
    elif n_outputs > 1 and len(set(task.outputs)) < n_outputs:
        findings.error("arity", f"{_name(task)} writes one buffer as two outputs", task.id)


def _name(task: Task) -> str:
    return f"task {task.id} ({task.label}): {task.op.name}"


def bound_faults(
    task: Task, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> Iterator[OperandFault]:
    """The faults of a task's operands by the table of operations."""
    params = in_rows(task.params)
    if params is not task.params and not any(buffer.kind is BufferKind.KV_CACHE for buffer in inputs):
        yield "kv-window", f"window={task.params['window']} of no KV cache"
    if task.op is InstructionKind.FUSED:
        yield from _recipe_faults(task, params, inputs, outputs)
    elif outputs:
        yield from operand_faults(task.op, params, inputs, outputs[0])


def _recipe_faults(
    task: Task, own: Mapping[str, Any], inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> Iterator[OperandFault]:
    inherited = {name: own[name] for name in INHERITED_PARAMS & own.keys()}
    values: dict[Arg | Target, Buffer] = {Input(number): buffer for number, buffer in enumerate(inputs)}
    for index, step in enumerate(recipe_steps(task)):
        result = values[step.out] = step.result(index)
        params, args = {**inherited, **step.params}, [values[arg] for arg in step.args]
        faults = list(operand_faults(step.op, params, args, result, is_step=True))
        if isinstance(step.out, Output) and step.op not in APPENDS:
            columns = tile(task.params) if step.out == FINAL else None
            faults += _output_faults(result, outputs[step.out.number], columns, tile_rows(task.params))
        for code, text in faults:
            yield code, f"step {index}: {step.op.name}: {text}"


def _output_faults(
    result: Buffer, output: Buffer, columns: tuple[int, int] | None, rows: int
) -> Iterator[OperandFault]:
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
