"""Each task alone: operands, params, bounds. Decisions are kept per shared record, so tiles of one projection cost little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flywheel.ir.dtype import READONLY_KINDS
from flywheel.ir.opcodes import OP_REGISTRY, PARAM_FIELDS, InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.bounds import check_bounds
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.params import check_params
from flywheel.ir.validate.recipe import Recipe, read_recipe
from flywheel.ir.version import ABI_MAX_INPUTS, ABI_MAX_OUTPUTS, ABI_MAX_WAITS


def check_tasks(program: MegakernelProgram, findings: Findings) -> None:
    """Arity, references, params, recipes and bounds of every task."""
    buffers = {buffer.id: buffer for buffer in program.buffers}
    num_sms = program.target.num_sms if program.target is not None else None
    operands: set[tuple[int, int, int]] = set()
    params: set[tuple[int, int]] = set()
    recipes: dict[int, Recipe | None] = {}
    for task in program.tasks:
        if findings.full:
            return
        before = len(findings.errors)
        key = (id(task.inputs), id(task.outputs), task.op)
        if key not in operands:
            _check_operands(task, buffers, findings)
            if len(findings.errors) == before:
                operands.add(key)
        if task.sm is not None and not (task.sm >= 0 and (num_sms is None or task.sm < num_sms)):
            findings.error("sm-range", f"task {task.id} ({task.label}): sm={task.sm} is not in 0..{num_sms} - 1", task.id)
        if len(task.waits) > ABI_MAX_WAITS:
            findings.error(
                "abi-limit", f"task {task.id} ({task.label}): {len(task.waits)} waits, at most {ABI_MAX_WAITS}", task.id
            )
        if (id(task.params), task.op) not in params:
            check_params(task, PARAM_FIELDS, OP_REGISTRY[task.op].required_params, findings)
            if len(findings.errors) == before:
                params.add((id(task.params), task.op))
        recipe = None
        if task.op is InstructionKind.FUSED and len(findings.errors) == before:
            recipe = _recipe(task, recipes, findings)
        if len(findings.errors) == before:
            check_bounds(task, recipe, buffers, findings)


def _recipe(task: Task, known: dict[int, Recipe | None], findings: Findings) -> Recipe | None:
    data = task.params["recipe"]
    if id(data) not in known:
        known[id(data)] = read_recipe(task, data, findings)
    recipe = known[id(data)]
    if recipe is not None:
        recipe.check_task(task, findings)
    return recipe


def _check_operands(task: Task, buffers: Mapping[int, Buffer], findings: Findings) -> None:
    spec = OP_REGISTRY[task.op]
    name = f"task {task.id} ({task.label}): {task.op.name}"
    n_inputs, n_outputs = len(task.inputs), len(task.outputs)
    most = spec.max_inputs if spec.max_inputs >= 0 else ABI_MAX_INPUTS
    if not spec.min_inputs <= n_inputs <= most:
        code = "abi-limit" if n_inputs > ABI_MAX_INPUTS else "arity"
        findings.error(code, f"{name} has {n_inputs} inputs, not {spec.min_inputs}..{most}", task.id)
    least, most = (spec.n_outputs, spec.n_outputs) if spec.n_outputs >= 0 else (1, ABI_MAX_OUTPUTS)
    if not least <= n_outputs <= most:
        code = "abi-limit" if n_outputs > ABI_MAX_OUTPUTS else "arity"
        findings.error(code, f"{name} has {n_outputs} outputs, not {least}..{most}", task.id)
    _check_references(task, task.inputs, "input", buffers, findings)
    _check_references(task, task.outputs, "output", buffers, findings)
    for number in task.outputs:
        buffer = buffers.get(number)
        if buffer is not None and buffer.kind in READONLY_KINDS:
            findings.error(
                "readonly-write", f"{name} writes buffer {number} ({buffer.name}), a {buffer.kind.name}", task.id
            )


def _check_references(
    task: Task, numbers: Sequence[int], role: str, buffers: Mapping[int, Any], findings: Findings
) -> None:
    for number in numbers:
        if number not in buffers:
            findings.error("unknown-buffer", f"task {task.id} ({task.label}): {role} {number} names no buffer", task.id)
    if role == "output" and len(set(numbers)) < len(numbers):
        findings.error("arity", f"task {task.id} ({task.label}): writes one buffer as two outputs", task.id)
