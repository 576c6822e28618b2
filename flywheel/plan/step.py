"""Tasks as lists of steps: a plain opcode or a recipe, with operand refs instead of names.

A ref below RESULT_REF is an input of the task. From RESULT_REF on it is the scratch result of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import Any, Final

from flywheel.errors import InvalidProgramError
from flywheel.ir import INHERITED_PARAMS, BufferKind, DType, InstructionKind
from flywheel.ir.operations import APPENDS, ATTENTIONS, PRODUCTS
from flywheel.ir.recipe import Recipe, Scratch, Target
from flywheel.plan.formats import Coding, coding_of
from flywheel.plan.staging import Slices

_K = InstructionKind

RESULT_REF: Final = 16
"""An operand ref below this is a task input; from here on it is the scratch result of step `ref - RESULT_REF`."""

MAX_STEPS: Final = 16
"""Most steps of one task."""

ABSENT: Final = -1
"""Stands for no ref, table index or counter."""


class Epilogue(IntEnum):
    """What a matrix step does to its rounded product before it stores it. `other` is the step's operand of that
    name."""

    NONE = 0
    ADD = 1
    """product + other, in the task's columns (a residual)."""
    SILU_MUL = 2
    """silu(other) * product, `other` being a scratch result (the gate)."""


@dataclass(frozen=True, slots=True)
class StepOperand:
    """Type, shape and kind of an operand or a result. Scratch has no kind."""

    dtype: DType
    shape: tuple[int, ...]
    kind: BufferKind | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of the last dimension."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.nbytes(self.numel)


@dataclass(frozen=True, slots=True)
class Form:
    """The common properties of tasks with the same steps: everything except buffer ids and tile params.

    `own` are a plain opcode's params that are the same for every tile. `given` names the params that may differ.
    `written[k]` is the output that is also input k, if there is one. `kv_rows` is a KvRows or None.
    """

    op: InstructionKind
    recipe: Recipe | None
    own: Mapping[str, Any]
    given: frozenset[str]
    kv_rows: int | None
    inputs: tuple[StepOperand, ...]
    outputs: tuple[StepOperand, ...]
    written: tuple[int | None, ...]
    widest: int
    """Columns of the widest tile; 0 where tiles name none."""

    @property
    def columns(self) -> bool:
        """Whether the task names columns."""
        return {"n_off", "N_tile"} <= self.given

    @property
    def rows(self) -> int:
        """Rows of output 0 that a recipe's tile spans. Above 1, its matrix step writes as a plain matrix tile does."""
        tiled = self.op is _K.FUSED and self.columns and self.outputs[0].kind is not BufferKind.KV_CACHE
        return int(self.own.get("M_tile", 1)) if tiled else 1


@dataclass(frozen=True, slots=True)
class MatrixCoding:
    """How the matrix of a product is quantised: its format, and the inputs that are its scales and zero points."""

    coding: Coding
    scales: int
    zeros: int
    group: int
    rows_per_scale: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One primitive operation. `params` are its own. `out` is an output of the task, or ABSENT for scratch.

    `result` is its result, in the dtype that it rounds to first. `slices` is how a product divides K; None for all at
    once. `coded` is the matrix format of a product that includes a DEQUANT.
    """

    op: InstructionKind
    args: tuple[int, ...]
    params: Mapping[str, Any]
    out: int
    result: StepOperand
    epilogue: Epilogue = Epilogue.NONE
    other: int = ABSENT
    slices: Slices | None = None
    coded: MatrixCoding | None = None

    @property
    def depth(self) -> int:
        """Columns of x that a matrix step multiplies at once."""
        return self.slices.depth if self.slices is not None else int(self.params["K"])

    @property
    def beside(self) -> int:
        """Slices of x that lie in the staging area at once."""
        return self.slices.beside if self.slices is not None else 1

    @property
    def n_slices(self) -> int:
        """Slices of x."""
        return -(-int(self.params["K"]) // self.depth)

    @property
    def streams(self) -> bool:
        """Whether its slices of x replace each other."""
        return self.depth * self.beside < int(self.params["K"])

    @property
    def matrix(self) -> bool:
        """Whether matrix warps do the step."""
        return self.op in PRODUCTS

    @property
    def attends(self) -> bool:
        """Whether its kernel takes the place of a staged operand and of partial sums for its own."""
        return self.op in ATTENTIONS

    @property
    def reads(self) -> tuple[int, ...]:
        """Refs of all operands."""
        return self.args if self.other == ABSENT else (*self.args, self.other)


def steps_of(form: Form) -> list[PlannedStep]:
    """The steps of a task. Operations that one kernel does together are one step."""
    if form.op is _K.NOP:
        return []
    if form.recipe is None:
        result = replace(form.outputs[0], kind=None)
        return [PlannedStep(form.op, tuple(range(len(form.inputs))), form.own, 0, result)]
    return _renumbered(_fused(_recipe_steps(form.recipe, form), form))


def _recipe_steps(recipe: Recipe, form: Form) -> dict[int, PlannedStep]:
    """The steps by their place in the recipe. Refs count these places from RESULT_REF."""
    made: dict[Target, int] = {}
    steps: dict[int, PlannedStep] = {}
    for index, each in enumerate(recipe.steps):
        args = tuple(made[arg] if isinstance(arg, Scratch) else arg.number for arg in each.args)
        result, place = StepOperand(each.dtype, each.shape), ABSENT
        if isinstance(each.out, Scratch):
            made[each.out] = RESULT_REF + index
        else:
            place = each.out.number
            if each.op in APPENDS:  # writes the appended rows only, and rounds once
                result = replace(form.outputs[place], kind=None)
        steps[index] = PlannedStep(each.op, args, each.params, place, result)
    return steps


def _fused(steps: dict[int, PlannedStep], form: Form) -> dict[int, PlannedStep]:
    """The steps, with each DEQUANT merged into the matrix step that reads it, and additions and SwiGLUs merged into the
    matrix step that makes their operand."""
    _take_codes(steps, form)
    _take_shards(steps, form)
    uses: dict[int, int] = {}
    for step in steps.values():
        for ref in step.args:
            uses[ref] = uses.get(ref, 0) + 1
    for index, step in list(steps.items()):
        if step.op is _K.ADD:
            for product, other in (step.args, step.args[::-1]):
                if _adds(steps, uses, form, step, product, other):
                    copied = steps.pop(other - RESULT_REF)
                    _absorb(steps, index, product, Epilogue.ADD, copied.args[0])
                    break
        elif step.op is _K.SILU_MUL:
            gate, product = step.args
            if _gates(steps, uses, form, step, gate, product):
                _absorb(steps, index, product, Epilogue.SILU_MUL, gate)
    return steps


def _take_codes(steps: dict[int, PlannedStep], form: Form) -> None:
    """Turn a product of rows that a DEQUANT makes into a product with the quantised matrix's rows."""
    made = [step.args[1] for step in steps.values() if step.matrix]
    for index, step in list(steps.items()):
        maker = steps.get(step.args[1] - RESULT_REF) if step.matrix else None
        if maker is None or maker.op is not _K.DEQUANT or made.count(step.args[1]) != 1:
            continue
        if step.params.get("n_off") != 0 or any(ref >= RESULT_REF for ref in maker.args):
            continue
        bias = [_copied_columns(steps, form, ref) for ref in step.args[2:]]
        if ABSENT in bias:
            continue
        q, scales, *zeros = (form.inputs[ref] for ref in maker.args)
        zero = zeros[0].dtype if zeros else None
        depth = int(step.params["K"])
        coding = coding_of(q.dtype, (scales.dtype, scales.shape), zero, maker.params, depth)
        params = {name: value for name, value in step.params.items() if name not in ("n_off", "N_tile")}
        params |= {name: maker.params[name] for name in ("n_off", "N_tile") if name in maker.params}
        coded = MatrixCoding(
            coding, maker.args[1], maker.args[2] if zeros else ABSENT,
            int(maker.params["group"]), int(maker.params.get("rows_per_scale", 1)),
        )  # fmt: skip
        steps[index] = replace(step, args=(step.args[0], maker.args[0], *bias), params=params, coded=coded)
        for ref in step.args[1:]:
            del steps[ref - RESULT_REF]


def _take_shards(steps: dict[int, PlannedStep], form: Form) -> None:
    """Turn a sum of copied columns into a sum of the inputs. The kernel selects the columns itself."""
    for index, step in list(steps.items()):
        if step.op is not _K.ALLREDUCE_SHARD or step.out != 0:
            continue
        copied = [steps.get(ref - RESULT_REF) for ref in step.args]
        inputs = [_copied_columns(steps, form, ref, form.rows) for ref in step.args]
        if ABSENT in inputs or None in copied:
            continue
        steps[index] = replace(step, args=tuple(inputs))
        for ref in step.args:
            del steps[ref - RESULT_REF]


def _copied_columns(steps: Mapping[int, PlannedStep], form: Form, ref: int, rows: int = 1) -> int:
    """The input whose own columns, in `rows` rows, a COPY copies unrounded for one step alone; ABSENT if there is
    none."""
    copied = steps.get(ref - RESULT_REF)
    if copied is None or copied.op is not _K.COPY or copied.args[0] >= RESULT_REF or not form.columns:
        return ABSENT
    used = sum(step.args.count(ref) for step in steps.values())
    own = {"n_off", "N_tile"} & copied.params.keys() or copied_rows(copied) != rows or used != 1
    exact = copied.result.dtype is form.inputs[copied.args[0]].dtype
    return copied.args[0] if exact and not own and form.written[copied.args[0]] is None else ABSENT


def _absorb(steps: dict[int, PlannedStep], index: int, product: int, epilogue: Epilogue, other: int) -> None:
    """Make step `index` the epilogue of the matrix step that makes `product`. The matrix step moves to its place."""
    last, matrix = steps[index], steps.pop(product - RESULT_REF)
    steps[index] = replace(matrix, out=last.out, epilogue=epilogue, other=other)


def _takes(steps: dict[int, PlannedStep], uses: Mapping[int, int], form: Form, step: PlannedStep, product: int) -> bool:
    """Whether a matrix step makes `product` for `step` alone, and rounding it before the sum is stored loses
    nothing."""
    matrix = steps.get(product - RESULT_REF)
    if matrix is None or not matrix.matrix or uses[product] != 1 or matrix.epilogue is not Epilogue.NONE:
        return False
    if step.result.numel != matrix.result.numel:
        return False
    if any(ref < RESULT_REF and form.written[ref] is not None for ref in matrix.args):
        return False  # the product moves to the place of `step`, past the writer of that input
    if step.out == ABSENT:
        return step.result.dtype is matrix.result.dtype
    return step.result.dtype in (DType.F32, form.outputs[step.out].dtype)


def _adds(
    steps: dict[int, PlannedStep], uses: Mapping[int, int], form: Form, step: PlannedStep, product: int, other: int
) -> bool:
    """Whether `other` copies the task's own columns of an input, and the matrix step of the same columns and rows can
    add them."""
    copied = steps.get(other - RESULT_REF)
    if copied is None or copied.op is not _K.COPY or uses[other] != 1 or copied.args[0] >= RESULT_REF:
        return False
    if not form.columns or {"n_off", "N_tile"} & copied.params.keys() or not _takes(steps, uses, form, step, product):
        return False
    matrix, source = steps[product - RESULT_REF], form.inputs[copied.args[0]]
    rows = copied_rows(copied)
    if {"n_off", "N_tile"} & matrix.params.keys() or matrix.result.rows != rows or _x_rows(matrix, steps, form) != rows:
        return False
    return form.written[copied.args[0]] is None and copied.result.dtype in (source.dtype, DType.F32)


def copied_rows(step: PlannedStep) -> int:
    """The number of rows from which a COPY takes columns."""
    return int(step.params.get("M_tile", 1))


def _x_rows(matrix: PlannedStep, steps: Mapping[int, PlannedStep], form: Form) -> int:
    ref = matrix.args[0]
    x = form.inputs[ref] if ref < RESULT_REF else steps[ref - RESULT_REF].result
    return x.numel // int(matrix.params["K"])


def _gates(
    steps: dict[int, PlannedStep], uses: Mapping[int, int], form: Form, step: PlannedStep, gate: int, product: int
) -> bool:
    """Whether the gate is a scratch value, and the matrix step of the other operand can apply it."""
    made = steps.get(gate - RESULT_REF)
    return made is not None and gate != product and _takes(steps, uses, form, step, product)


def _renumbered(steps: dict[int, PlannedStep]) -> list[PlannedStep]:
    """The remaining steps in order, with refs renumbered."""
    places = {RESULT_REF + index: RESULT_REF + place for place, index in enumerate(sorted(steps))}
    return [
        replace(
            step,
            args=tuple(places.get(ref, ref) for ref in step.args),
            other=places.get(step.other, step.other),
        )
        for _, step in sorted(steps.items())
    ]


def inherited(step: PlannedStep, form: Form, name: str) -> bool:
    """Whether `step` takes param `name` from the task."""
    return name in INHERITED_PARAMS and name in form.given and name not in step.params


def adds_columns(step: PlannedStep, form: Form) -> bool:
    """Whether `step` is an ALLREDUCE_SHARD that adds the task's columns of longer inputs."""
    inputs = [form.inputs[ref] for ref in step.args if ref < RESULT_REF]
    return step.op is _K.ALLREDUCE_SHARD and form.columns and len(inputs) == len(step.args)


def is_push(steps: Sequence[PlannedStep], form: Form) -> bool:
    """Whether a task copies its own columns, of one or several rows, and does nothing else."""
    first = steps[0]
    return len(steps) == 1 and names_columns(first, form) and first.out == 0 and copied_rows(first) == form.rows


def names_columns(step: PlannedStep, form: Form) -> bool:
    """Whether `step` is a COPY of columns."""
    named = all(name in step.params or inherited(step, form, name) for name in ("n_off", "N_tile"))
    return step.op is _K.COPY and named


def look(ref: int, steps: Sequence[PlannedStep], form: Form) -> StepOperand:
    """The operand that a ref stands for. Raises InvalidProgramError for a scratch result that no earlier step made."""
    if ref < RESULT_REF:
        return form.inputs[ref]
    if ref - RESULT_REF >= len(steps):
        raise InvalidProgramError(f"operand {ref}: no step makes it")
    return steps[ref - RESULT_REF].result


def x_rows(matrix: PlannedStep, steps: Sequence[PlannedStep], form: Form) -> int:
    """Rows of x of a matrix step."""
    return look(matrix.args[0], steps, form).numel // int(matrix.params["K"])
