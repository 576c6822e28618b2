"""Whether recipes can run. A recipe may come from a stranger until it is checked here. Source: docs/ir.md."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Final

from flywheel.ir.opcodes import INHERITED_PARAMS, RECIPE_PARAM_FIELDS
from flywheel.ir.operations import APPENDS, OPERATIONS, operation_of
from flywheel.ir.recipe import Input, Output, Recipe, RecipeStep, Scratch
from flywheel.ir.records import Task
from flywheel.ir.show import show
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.params import param_fault
from flywheel.ir.version import ABI_MAX_RANK

MAX_STEPS: Final = 64
MAX_SLOT: Final = 1024


def check_recipe(task: Task, findings: Findings) -> bool:
    """Whether a FUSED task's recipe can run, and the task has the operands and params that it uses."""
    where, recipe = f"task {task.id} ({task.label})", task.params["recipe"]
    if type(recipe) is not Recipe:
        findings.error("bad-recipe", f"{where}: recipe: expected a Recipe, got {show(recipe)}", task.id)
        return False
    fault = recipe_fault(recipe)
    if fault is not None:
        findings.error("bad-recipe", f"{where}: recipe: {fault}", task.id)
        return False
    where, before = f"{where}: {task.op.name}", len(findings.errors)
    read = max([arg.number + 1 for step in recipe.steps for arg in step.args if isinstance(arg, Input)], default=0)
    made = sum(isinstance(step.out, Output) for step in recipe.steps)
    n_inputs, n_outputs = len(task.inputs), len(task.outputs)
    if read > n_inputs:
        findings.error("bad-recipe", f"{where}: recipe uses input {read - 1} of {n_inputs}", task.id)
    if made != n_outputs:
        findings.error("bad-recipe", f"{where}: recipe writes {made} outputs of {n_outputs}", task.id)
    missing = _inherited(recipe) - task.params.keys()
    if missing:
        text = f"a step of the recipe needs param {', '.join(sorted(missing))}"
        findings.error("missing-param", f"{where}: {text}", task.id)
    fixed = [name for step in recipe.steps for name in ("pos", "kv_start", "kv_len") if name in step.params]
    moving = [name for name in ("kv_rows", "window") if name in task.params]
    if fixed and moving:
        text = f"recipe: a step has its own {fixed[0]}, which {moving[0]} leaves to the task"
        findings.error("bad-recipe", f"{where}: {text}", task.id)
    if len(findings.errors) > before:
        return False
    for index, step in enumerate(recipe.steps):
        if step.op in APPENDS and not _appends_in_place(step, task):
            text = f"recipe: step {index}: {step.op.name} must write the output that is its cache operand"
            findings.error("kv-target", f"{where}: {text}", task.id)
    return len(findings.errors) == before


def _inherited(recipe: Recipe) -> frozenset[str]:
    """The params that the steps take from the task."""
    return frozenset(
        name
        for step in recipe.steps
        for name in operation_of(step.op, step.params).params
        if name in INHERITED_PARAMS and name not in step.params
    )


def _appends_in_place(step: RecipeStep, task: Task) -> bool:
    source, target = step.args[1], step.out
    if not isinstance(source, Input) or not isinstance(target, Output):
        return False
    return task.inputs[source.number] == task.outputs[target.number]


@lru_cache(maxsize=1 << 12)
def recipe_fault(recipe: Recipe) -> str | None:
    """Why the recipe cannot run, whatever its task; None if it can."""
    if not 1 <= len(recipe.steps) <= MAX_STEPS:
        return f"{len(recipe.steps)} steps, not 1..{MAX_STEPS}"
    written: set[Scratch | Output] = set()
    for index, step in enumerate(recipe.steps):
        fault = _step_fault(step, written)
        if fault is None and step.out in written:
            fault = f"writes {step.out.role} {step.out.number} again"
        if fault is not None:
            return f"step {index}: {fault}"
        written.add(step.out)
    outputs = {target.number for target in written if isinstance(target, Output)}
    if outputs != set(range(len(outputs))) or not outputs:
        return f"writes outputs {show(sorted(outputs))}; 'final' and then every next one must be written"
    return None


def _step_fault(step: RecipeStep, written: set[Scratch | Output]) -> str | None:
    name = step.op.name
    if OPERATIONS[step.op].output is None:
        return f"op {show(name)} is not a primitive operation"
    for arg in step.args:
        if not 0 <= arg.number < MAX_SLOT:
            return f"operand {show(arg.number)} is not in 0..{MAX_SLOT - 1}"
        if isinstance(arg, Scratch) and arg not in written:
            return f"reads scratch {arg.number}, which no earlier step wrote"
    least, most = OPERATIONS[step.op].arity
    if not least <= len(step.args) <= most:
        return f"{name} has {len(step.args)} args, not {least}..{most}"
    fault = _params_fault(step.params, operation_of(step.op, step.params).params)
    if fault is not None:
        return f"{name}: {fault}"
    if not 1 <= len(step.shape) <= ABI_MAX_RANK or not all(0 < dim < 2**31 for dim in step.shape):
        return f"out_shape {show(list(step.shape))} is not 1..{ABI_MAX_RANK} positive ints"
    if prod(step.shape) > 2**40:
        return f"out_shape {show(list(step.shape))} holds more than 2^40 elements"
    if not 0 <= step.out.number < MAX_SLOT:
        return f"out {show(step.out.number)} is not in 0..{MAX_SLOT - 1}"
    return None


def _params_fault(params: Mapping[str, int | float], required: tuple[str, ...]) -> str | None:
    for key, value in params.items():
        kind = RECIPE_PARAM_FIELDS.get(key)
        fault = f"{show(key)}: unknown" if kind is None else param_fault(key, value, kind)
        if fault is not None:
            return f"param {fault}"
    missing = [key for key in required if key not in params and key not in INHERITED_PARAMS]
    return f"needs param {missing[0]}" if missing else None
