"""FUSED recipes: primitive steps over on-chip scratch, written by strangers until read here. Source: docs/ir.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flywheel.ir.dtype import DType
from flywheel.ir.opcodes import INHERITED_PARAMS, OP_REGISTRY, RECIPE_PARAM_FIELDS, InstructionKind
from flywheel.ir.records import Task
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.params import param_fault
from flywheel.ir.version import ABI_MAX_RANK

MAX_STEPS: Final = 64

NOT_PRIMITIVE: Final = frozenset({InstructionKind.FUSED, InstructionKind.NOP, InstructionKind.ALLREDUCE_SHARD})


@dataclass(frozen=True, slots=True)
class Step:
    """One checked step: the op, its operands (`("in", k)` or `("s", j)`), its own params and the size of its result."""

    op: InstructionKind
    args: tuple[tuple[str, int], ...]
    params: Mapping[str, Any]
    out: tuple[str, int]
    numel: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked recipe. `inherits` names the params that its steps take from the task."""

    steps: tuple[Step, ...]
    n_inputs: int
    n_outputs: int
    inherits: frozenset[str]

    def check_task(self, task: Task, findings: Findings) -> None:
        """The task gives the recipe the operands and params that it uses."""
        where = f"task {task.id} ({task.label})"
        if self.n_inputs > len(task.inputs):
            findings.error("bad-recipe", f"{where}: recipe uses input {self.n_inputs - 1} of {len(task.inputs)}", task.id)
        if self.n_outputs != len(task.outputs):
            findings.error(
                "bad-recipe", f"{where}: recipe writes {self.n_outputs} outputs of {len(task.outputs)}", task.id
            )
        for name in sorted(self.inherits - task.params.keys()):
            findings.error("missing-param", f"{where}: a step of the recipe needs param {name}", task.id)


class _Fault(Exception):
    """What is wrong with a recipe."""


def read_recipe(task: Task, data: object, findings: Findings) -> Recipe | None:
    """The recipe, or None where it is malformed."""
    try:
        steps = _field(_mapping(data, "recipe"), "steps", list | tuple)
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
        if slot in (outputs if kind == "out" else scratch):
            raise _Fault(f"step {index}: writes {kind} {slot} again")
        (outputs if kind == "out" else scratch).add(slot)
        inherits |= {
            name
            for name in OP_REGISTRY[step.op].required_params
            if name in INHERITED_PARAMS and name not in step.params
        }
        n_inputs = max([n_inputs, *(number + 1 for role, number in step.args if role == "in")])
        steps.append(step)
    if outputs != set(range(len(outputs))) or not outputs:
        raise _Fault(f"writes outputs {sorted(outputs)}; 'final' and then every next one must be written")
    return Recipe(tuple(steps), n_inputs, len(outputs), frozenset(inherits))


def _read_step(item: Mapping[str, Any], where: str, scratch: set[int]) -> Step:
    name = _field(item, "op", str, where)
    op = InstructionKind.__members__.get(name)
    if op is None or op in NOT_PRIMITIVE:
        raise _Fault(f"{where}: op {name[:40]!r} is not a primitive operation")
    spec = OP_REGISTRY[op]
    args = tuple(_operand(arg, where, scratch) for arg in _field(item, "args", list | tuple, where))
    if not spec.min_inputs <= len(args) <= spec.max_inputs:
        raise _Fault(f"{where}: {name} has {len(args)} args, not {spec.min_inputs}..{spec.max_inputs}")
    params = _mapping(item.get("params", {}), f"{where}: params")
    for key, value in params.items():
        fault = param_fault(key, value, RECIPE_PARAM_FIELDS[key]) if key in RECIPE_PARAM_FIELDS else f"{key!r:.40}: unknown"
        if fault is not None:
            raise _Fault(f"{where}: param {fault}")
    for key in spec.required_params:
        if key not in params and key not in INHERITED_PARAMS:
            raise _Fault(f"{where}: {name} needs param {key}")
    if _field(item, "out_dtype", str, where) not in DType.__members__:
        raise _Fault(f"{where}: out_dtype {item['out_dtype'][:40]!r} is not a DType")
    numel = 1
    shape = _field(item, "out_shape", list | tuple, where)
    if not 1 <= len(shape) <= ABI_MAX_RANK or not all(type(dim) is int and dim > 0 for dim in shape):
        raise _Fault(f"{where}: out_shape is not 1..{ABI_MAX_RANK} positive ints")
    for dim in shape:
        numel *= dim
    return Step(op, args, params, _target(item.get("out"), where), numel)


def _operand(arg: object, where: str, scratch: set[int]) -> tuple[str, int]:
    pairs = list(_mapping(arg, f"{where}: arg").items())
    if len(pairs) != 1 or pairs[0][0] not in ("in", "s") or type(pairs[0][1]) is not int or pairs[0][1] < 0:
        raise _Fault(f'{where}: an arg is {{"in": k}} or {{"s": j}}')
    role, number = pairs[0]
    if role == "s" and number not in scratch:
        raise _Fault(f"{where}: reads scratch {number}, which no earlier step wrote")
    return role, number


def _target(out: object, where: str) -> tuple[str, int]:
    if out == "final":
        return "out", 0
    if type(out) is int and out >= 0:
        return "s", out
    if isinstance(out, Mapping) and list(out) == ["out"] and type(out["out"]) is int and out["out"] >= 0:
        return "out", out["out"]
    raise _Fault(f'{where}: out is a scratch number, "final" or {{"out": k}}')


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
        raise _Fault(f"{where}: expected an object")
    return value


def _field(item: Mapping[str, Any], name: str, kind: Any, where: str = "recipe") -> Any:
    value = item.get(name)
    if not isinstance(value, kind):
        raise _Fault(f"{where}: {name} is missing or of the wrong type")
    return value
