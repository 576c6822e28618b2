"""FUSED recipes: primitive steps over on-chip scratch, as values. Grammar: docs/ir.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from threading import Lock
from typing import Any, Final, Literal, NamedTuple
from weakref import WeakValueDictionary

from flywheel.errors import IrFormatError
from flywheel.ir.dtype import BufferKind, DType, MemSpace
from flywheel.ir.fields import (
    read_dict,
    read_enum,
    read_field,
    read_float,
    read_int,
    read_ints,
    read_list,
    read_number,
)
from flywheel.ir.opcodes import RECIPE_PARAM_FIELDS, InstructionKind
from flywheel.ir.records import Buffer, Task, maker
from flywheel.ir.show import one_line, show


class Input(NamedTuple):
    """Input `number` of the task."""

    number: int
    role: Literal["in"] = "in"


class Scratch(NamedTuple):
    """Result `number` of the recipe, which stays on the chip."""

    number: int
    role: Literal["s"] = "s"


class Output(NamedTuple):
    """Output `number` of the task."""

    number: int
    role: Literal["out"] = "out"


Arg = Input | Scratch
Target = Scratch | Output

FINAL: Final = Output(0)
"""The first output of the task."""


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """One primitive operation with params of its own. Its result has a shape and a type, and goes to `out`."""

    op: InstructionKind
    args: tuple[Arg, ...]
    out: Target
    shape: tuple[int, ...]
    dtype: DType
    params: Mapping[str, Any]
    """Numbers; tables are tuples of them."""

    @property
    def numel(self) -> int:
        """Number of elements of the result."""
        return prod(self.shape)

    def result(self, index: int) -> Buffer:
        """The result as a buffer, for messages that name step `index`."""
        name = f"recipe step {index}"
        return Buffer(self.out.number, name, BufferKind.ACTIVATION, self.dtype, self.shape, MemSpace.REGISTER)


make_step: Final = maker(RecipeStep)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Recipe:
    """The steps of a FUSED task. `recipe_of` makes it: equal recipes are one object, so that `is` compares them."""

    steps: tuple[RecipeStep, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return recipe_of, (self.steps,)


_known: WeakValueDictionary[tuple[object, ...], Recipe] = WeakValueDictionary()
_knowing = Lock()


def recipe_of(steps: Iterable[RecipeStep]) -> Recipe:
    """The recipe of these steps. A param 1 and a param 1.0 are different."""
    listed = tuple(steps)
    key = tuple([
        (step.op, step.args, step.out, step.shape, step.dtype, *step.params.items(), *map(type, step.params.values()))
        for step in listed
    ])  # fmt: skip
    with _knowing:
        known = _known.get(key)
        if known is None:
            known = _known[key] = Recipe(listed)
        return known


def recipe_steps(task: Task) -> tuple[RecipeStep, ...]:
    """The steps of a FUSED task's recipe; none for any other task."""
    if task.op is not InstructionKind.FUSED:
        return ()
    recipe: Recipe = task.params["recipe"]
    return recipe.steps


def recipe_from_dict(data: object, where: str = "recipe") -> Recipe:
    """Read a recipe, dropping unknown fields. Raises IrFormatError. Whether it can run is for the validator to say."""
    items = read_list(read_field(read_dict(data, where), "steps", where), where, "steps")
    return recipe_of([_step(item, f"{where}.steps[{index}]") for index, item in enumerate(items)])


def _step(data: object, where: str) -> RecipeStep:
    item = read_dict(data, where)
    params = read_dict(item.get("params", {}), where, "params")
    return RecipeStep(
        op=read_enum(InstructionKind, read_field(item, "op", where), where, "op"),
        args=tuple([_arg(arg, f"{where}.args") for arg in read_list(read_field(item, "args", where), where, "args")]),
        out=_target(read_field(item, "out", where), f"{where}.out"),
        shape=read_ints(read_field(item, "out_shape", where), where, "out_shape"),
        dtype=read_enum(DType, read_field(item, "out_dtype", where), where, "out_dtype"),
        params={name: _param(name, value, f"{where}.params") for name, value in params.items()},
    )


def _param(name: str, value: object, where: str) -> int | float | tuple[float, ...]:
    if RECIPE_PARAM_FIELDS.get(name) != "t":
        return read_number(value, where, _shown(name))
    # A zero has no sign: equal tables are written alike.
    return tuple([read_float(each, where, name) + 0.0 for each in read_list(value, where, name)])


def _shown(name: str) -> str:
    return name if name.isidentifier() else show(name)


def _arg(data: object, where: str) -> Arg:
    pairs = list(read_dict(data, where).items())
    if len(pairs) != 1 or pairs[0][0] not in ("in", "s"):
        raise IrFormatError(one_line(f'{where}: expected {{"in": k}} or {{"s": j}}, got {show(data)}'))
    index = read_int(pairs[0][1], where, pairs[0][0])
    return Input(index) if pairs[0][0] == "in" else Scratch(index)


def _target(data: object, where: str) -> Target:
    if type(data) is int:
        return Scratch(data)
    if type(data) is str and data == "final":
        return FINAL
    if type(data) is not dict or list(data) != ["out"]:
        raise IrFormatError(one_line(f'{where}: expected a number, "final" or {{"out": k}}, got {show(data)}'))
    return Output(read_int(data["out"], where, "out"))


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The JSON-ready form of a recipe."""
    return {
        "steps": [
            {
                "op": step.op.name,
                "args": [{arg.role: arg.number} for arg in step.args],
                "out": _written(step.out),
                "params": {name: list(v) if type(v) is tuple else v for name, v in step.params.items()},
                "out_shape": list(step.shape),
                "out_dtype": step.dtype.name,
            }
            for step in recipe.steps
        ]
    }


def _written(out: Target) -> object:
    if isinstance(out, Scratch):
        return out.number
    return "final" if out == FINAL else {out.role: out.number}


@lru_cache(maxsize=1 << 12)
def recipe_digest(recipe: Recipe) -> str:
    """The SHA-256 of a recipe's JSON, in hex digits. Programs of one search share most recipes."""
    text = json.dumps(recipe_to_dict(recipe), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class RecipeBuilder:
    """Collects the steps of one recipe and the names of its operands, in order of first use."""

    __slots__ = ("_slots", "_steps", "inputs")

    def __init__(self, inputs: Sequence[str] = ()) -> None:
        self.inputs: list[str] = list(inputs)
        self._steps: list[RecipeStep] = []
        self._slots = 0

    def operand(self, name: str) -> Arg:
        """The arg that reads operand `name`."""
        if name not in self.inputs:
            self.inputs.append(name)
        return Input(self.inputs.index(name))

    def step(
        self,
        op: InstructionKind,
        args: Sequence[Arg],
        width: int,
        dtype: DType,
        params: Mapping[str, Any] | None = None,
        out: Output | None = None,
        rows: int = 1,
    ) -> Arg:
        """Append a step with a `[rows, width]` result, which goes to `out`, or to scratch. Returns the arg that reads
        a result in scratch."""
        scratch = Scratch(self._slots)
        target = scratch if out is None else out
        self._slots += out is None
        self._steps.append(make_step(op, tuple(args), target, (rows, width), dtype, dict(params or {})))
        return scratch

    def columns(self, name: str, start: int, width: int, dtype: DType) -> Arg:
        """The arg that reads columns `start`..`start + width` of operand `name`."""
        params = {"n_off": start, "N_tile": width}
        return self.step(InstructionKind.COPY, [self.operand(name)], width, dtype, params)

    def build(self) -> Recipe:
        """The recipe."""
        return recipe_of(self._steps)
