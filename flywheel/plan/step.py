"""Tasks as lists of steps: a plain opcode or a recipe, with operand refs instead of names.

A ref below RESULT_REF is an input of the task. From RESULT_REF on it is the scratch result of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, Final

from flywheel.errors import InvalidProgramError
from flywheel.ir import INHERITED_PARAMS, BufferKind, DType, InstructionKind
from flywheel.ir.operations import ATTENTIONS, PRODUCTS
from flywheel.ir.recipe import Recipe
from flywheel.plan.formats import Coding

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
    GELU_MUL = 3
    """gelu(other) * product, with tanh; `other` as of SILU_MUL."""
    GELU = 4
    """gelu(product), with tanh."""


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
    `written[k]` is the output that is also input k, if there is one. `kv_rows` is a KvRows or None. `misses` says
    whether the window may be empty at some position, where the task also appends a row.
    """

    op: InstructionKind
    recipe: Recipe | None
    own: Mapping[str, Any]
    given: frozenset[str]
    kv_rows: int | None
    misses: bool
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

    `result` is its result, in the dtype that it rounds to first. `sliced` is the columns of K of a product's slices;
    None for all of K at once. `coded` is the matrix format of a product that includes a DEQUANT.
    """

    op: InstructionKind
    args: tuple[int, ...]
    params: Mapping[str, Any]
    out: int
    result: StepOperand
    epilogue: Epilogue = Epilogue.NONE
    other: int = ABSENT
    sliced: int | None = None
    coded: MatrixCoding | None = None

    @property
    def depth(self) -> int:
        """Columns of x that a matrix step multiplies at once."""
        return self.sliced if self.sliced is not None else int(self.params["K"])

    @property
    def n_slices(self) -> int:
        """Slices of x."""
        return -(-int(self.params["K"]) // self.depth)

    @property
    def streams(self) -> bool:
        """Whether x comes in slices, which replace each other."""
        return self.sliced is not None

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


def copied_rows(step: PlannedStep) -> int:
    """The number of rows from which a COPY takes columns."""
    return int(step.params.get("M_tile", 1))


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
