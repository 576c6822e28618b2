"""FUSED recipes: primitive steps over on-chip scratch. A recipe may come from a stranger until it is checked here.
Source: docs/ir.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from flywheel.ir.dtype import BufferKind, DType, MemSpace
from flywheel.ir.opcodes import INHERITED_PARAMS, RECIPE_PARAM_FIELDS, InstructionKind
from flywheel.ir.operations import OPERATIONS, operation_of
from flywheel.ir.records import Buffer, Task
from flywheel.ir.show import show
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.params import param_fault
from flywheel.ir.version import ABI_MAX_RANK

MAX_STEPS: Final = 64
MAX_SLOT: Final = 1024

NOT_PRIMITIVE: Final = frozenset({InstructionKind.FUSED, InstructionKind.NOP})

Slot = tuple[str, int]
"""An operand or result: ("in", k), ("s", j) or ("out", k)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One checked step: the op, its operands, its own params, and the place, shape and type of its result."""

    op: InstructionKind
    args: tuple[Slot, ...]
    params: Mapping[str, Any]
    out: Slot
    result: Buffer


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked recipe. `inherits` names the params that its steps take from the task."""

    steps: tuple[Step, ...]
    n_inputs: int
    n_outputs: int
    inherits: frozenset[str]

    def check_task(self, task: Task, findings: Findings) -> bool:
        """Whether the task has the operands and params that the recipe uses."""
        where = f"task {task.id} ({task.label}): {task.op.name}"
        before = len(findings.errors)
        n_inputs, n_outputs = len(task.inputs), len(task.outputs)
        if self.n_inputs > n_inputs:
            findings.error("bad-recipe", f"{where}: recipe uses input {self.n_inputs - 1} of {n_inputs}", task.id)
        if self.n_outputs != n_outputs:
            findings.error("bad-recipe", f"{where}: recipe writes {self.n_outputs} outputs of {n_outputs}", task.id)
        if not self.inherits <= task.params.keys():
            missing = ", ".join(sorted(self.inherits - task.params.keys()))
            findings.error("missing-param", f"{where}: a step of the recipe needs param {missing}", task.id)
        fixed = [name for step in self.steps for name in ("pos", "kv_start", "kv_len") if name in step.params]
        if fixed and "kv_rows" in task.params:
            text = f"recipe: a step has its own {fixed[0]}, which kv_rows leaves to the task"
            findings.error("bad-recipe", f"{where}: {text}", task.id)
        if len(findings.errors) > before:
            return False
        for index, step in enumerate(self.steps):
            if step.op is InstructionKind.KV_APPEND and not _appends_in_place(step, task):
                text = f"recipe: step {index}: KV_APPEND must write the output that is its cache operand"
                findings.error("kv-target", f"{where}: {text}", task.id)
        return len(findings.errors) == before


def _appends_in_place(step: Step, task: Task) -> bool:
    (role, source), (kind, target) = step.args[1], step.out
    return role == "in" and kind == "out" and task.inputs[source] == task.outputs[target]


class _Fault(Exception):
    """A fault of a recipe."""


def read_recipe(task: Task, data: object, findings: Findings) -> Recipe | None:
    """The checked recipe; None where it is malformed."""
    try:
        steps = _list(_mapping(data, "recipe"), "steps", "recipe")
        if not 1 <= len(steps) <= MAX_STEPS:
            raise _Fault(f"{len(steps)} steps, not 1..{MAX_STEPS}")
        return _read_steps(steps)
    except _Fault as fault:
        findings.error("bad-recipe", f"task {task.id} ({task.label}): recipe: {fault}", task.id)
        return None


def _read_steps(items: Any) -> Recipe:
    steps: list[Step] = []
    scratch: set[int] = set()
    outputs: set[int] = set()
    inherits: set[str] = set()
    n_inputs = 0
    for index, item in enumerate(items):
        step = _read_step(_mapping(item, f"step {index}"), f"step {index}", scratch)
        kind, slot = step.out
        written = outputs if kind == "out" else scratch
        if slot in written:
            raise _Fault(f"step {index}: writes {kind} {slot} again")
        written.add(slot)
        inherits |= INHERITED_PARAMS.intersection(operation_of(step.op, step.params).params) - step.params.keys()
        n_inputs = max([n_inputs, *(number + 1 for role, number in step.args if role == "in")])
        steps.append(step)
    if outputs != set(range(len(outputs))) or not outputs:
        raise _Fault(f"writes outputs {show(sorted(outputs))}; 'final' and then every next one must be written")
    return Recipe(tuple(steps), n_inputs, len(outputs), frozenset(inherits))


def _read_step(item: Mapping[str, Any], where: str, scratch: set[int]) -> Step:
    name = _text(item, "op", where)
    op = InstructionKind.__members__.get(name)
    if op is None or op in NOT_PRIMITIVE:
        raise _Fault(f"{where}: op {show(name)} is not a primitive operation")
    row = OPERATIONS[op]
    least, most = row.arity
    args = tuple(_operand(arg, where, scratch) for arg in _list(item, "args", where))
    if not least <= len(args) <= most:
        raise _Fault(f"{where}: {name} has {len(args)} args, not {least}..{most}")
    params = _mapping(item.get("params", {}), f"{where}: params")
    _check_params(params, f"{where}: {name}", operation_of(op, params).params)
    dtype = DType.__members__.get(_text(item, "out_dtype", where))
    if dtype is None:
        raise _Fault(f"{where}: out_dtype {show(item['out_dtype'])} is not a DType")
    shape = _list(item, "out_shape", where)
    if not 1 <= len(shape) <= ABI_MAX_RANK or not all(type(dim) is int and 0 < dim < 2**31 for dim in shape):
        raise _Fault(f"{where}: out_shape {show(shape)} is not 1..{ABI_MAX_RANK} positive ints")
    if prod(shape) > 2**40:
        raise _Fault(f"{where}: out_shape {show(shape)} holds more than 2^40 elements")
    out = _target(item.get("out"), where)
    result = Buffer(out[1], f"recipe {where}", BufferKind.ACTIVATION, dtype, tuple(shape), MemSpace.REGISTER)
    return Step(op, args, params, out, result)


def _check_params(params: Mapping[str, Any], where: str, required: tuple[str, ...]) -> None:
    for key, value in params.items():
        kind = RECIPE_PARAM_FIELDS.get(key)
        fault = f"{show(key)}: unknown" if kind is None else param_fault(key, value, kind)
        if fault is not None:
            raise _Fault(f"{where}: param {fault}")
    for key in required:
        if key not in params and key not in INHERITED_PARAMS:
            raise _Fault(f"{where}: needs param {key}")


def _operand(arg: object, where: str, scratch: set[int]) -> Slot:
    pairs = list(_mapping(arg, f"{where}: arg").items())
    if len(pairs) != 1 or pairs[0][0] not in ("in", "s") or not _slot(pairs[0][1]):
        raise _Fault(f'{where}: an arg is {{"in": k}} or {{"s": j}}')
    role, number = pairs[0]
    if role == "s" and number not in scratch:
        raise _Fault(f"{where}: reads scratch {number}, which no earlier step wrote")
    return role, number


def _target(out: object, where: str) -> Slot:
    if type(out) is str and out == "final":
        return "out", 0
    if _slot(out):
        return "s", out  # type: ignore[return-value]
    if type(out) is dict:
        pairs = list(_mapping(out, f"{where}: out").items())
        if len(pairs) == 1 and pairs[0][0] == "out" and _slot(pairs[0][1]):
            return "out", pairs[0][1]
    raise _Fault(f'{where}: out is a scratch number, "final" or {{"out": k}}')


def _slot(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_SLOT


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if type(value) is not dict or not set(map(type, value)) <= {str}:
        raise _Fault(f"{where}: expected an object")
    return value


def _list(item: Mapping[str, Any], name: str, where: str) -> list[Any] | tuple[Any, ...]:
    value = item.get(name)
    if type(value) is not list and type(value) is not tuple:
        raise _Fault(f"{where}: {name} is missing or not a list")
    return value


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if type(value) is not str:
        raise _Fault(f"{where}: {name} is missing or not a string")
    return value
