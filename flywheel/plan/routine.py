"""The routine of all tasks of one form: their steps, the steps that another step's kernel computes, and the slices of K
of their products.

The input of a product may be larger than the staging area. Then a slice of it replaces the slice before it once that
one is multiplied. An operand that the task's own steps make is never split: it must fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from flywheel.errors import InvalidProgramError
from flywheel.ir import INHERITED_PARAMS, OPERATIONS, DType
from flywheel.ir.extents import Matrix
from flywheel.plan.new_row import NewRow
from flywheel.plan.operands import Staging, stagings_of
from flywheel.plan.rules import KERNELS, KernelDraft, rewrite
from flywheel.plan.staging import MIN_STAGED_BYTES, slice_depth
from flywheel.plan.step import ABSENT, RESULT_REF, Form, PlannedStep, inherited, look
from flywheel.plan.turning import Turn


@dataclass(frozen=True, slots=True)
class StagedValue:
    """A staged operand: its formula over some of the task's inputs, with its layout, and those inputs."""

    formula: Hashable
    inputs: tuple[int, ...]

    def over(self, buffers: Sequence[int]) -> Hashable:
        """A key. Tasks with equal keys have operands of the same bytes whenever the buffers' contents are the same."""
        return self.formula, tuple(buffers[number] for number in self.inputs)


@dataclass(frozen=True, slots=True)
class Routine:
    """The steps of a form and how they fit together. Steps are named by index.

    `views` are COPYs of columns that need not run, since their readers read the columns in the input. `turns` are
    attentions that apply RoPE to their queries themselves, except the attention of `new_row`, which has the steps of a
    launch's new cache row. `skipped_x` is the first matrix step's operand; if an earlier task has staged it, the steps
    before can be skipped. `left_x` is the operand that the last staging leaves. Either is None if no other task may
    rely on it.
    """

    form: Form
    steps: tuple[PlannedStep, ...]
    stagings: tuple[Staging, ...]
    views: frozenset[int]
    new_row: NewRow | None
    turns: tuple[Turn, ...]
    skipped_x: StagedValue | None
    left_x: StagedValue | None
    matrices: tuple[int, ...]
    """The matrix steps."""
    loose: frozenset[int]
    """The inputs that a step reads in row-major order."""

    def staging(self, step: int) -> Staging:
        """The staging that matrix step `step` multiplies."""
        return next(staging for staging in self.stagings if step in staging.steps)


def make_routine(whole: Sequence[PlannedStep], form: Form, dtype: DType, staged_bytes: int) -> Routine:
    """The routine of a form with the steps `whole` (from `steps_of`), in a program of `dtype` floats.

    The staging area has `staged_bytes`. Raises InvalidProgramError as `in_slices`.
    """
    steps = tuple(in_slices(whole, form, staged_bytes))
    stagings = stagings_of(steps, form)
    in_place = {staging.ref - RESULT_REF for staging in stagings if staging.in_place}
    draft = rewrite(KernelDraft(form, dict(enumerate(steps)), dtype, in_place), KERNELS)
    skipped, left = _shared_operands(steps, form, stagings)
    return Routine(
        form, steps, stagings, frozenset(draft.views), draft.new_row, tuple(draft.turns), skipped, left,
        matrices=tuple([index for index, step in enumerate(steps) if step.matrix]),
        loose=_loose(steps),
    )  # fmt: skip


def _loose(steps: Sequence[PlannedStep]) -> frozenset[int]:
    return frozenset([
        ref
        for step in steps
        for place, ref in enumerate(step.reads)
        if ref < RESULT_REF and not isinstance(OPERATIONS[step.op].operand(place).extent, Matrix)
    ])  # fmt: skip


def _shared_operands(
    steps: Sequence[PlannedStep], form: Form, stagings: Sequence[Staging]
) -> tuple[StagedValue | None, StagedValue | None]:
    """(operand that an earlier task may have staged, operand that a later task finds staged)."""
    if len(stagings) != 1 or any(step.attends for step in steps):
        return None, None  # an attention overwrites the staged operand
    if any(step.streams for step in steps if step.matrix):
        return None, None  # and so does a later slice
    (staging,) = stagings
    inputs: list[int] = []
    formula = _formula(staging.ref, steps, form, inputs)
    if formula is None:
        return None, None
    first = staging.steps[0]
    layout = (steps[first].params["K"], look(staging.ref, steps, form).dtype, staging.scaled_later, staging.held)
    value = StagedValue((formula, layout), tuple(inputs))
    return (value if _is_for_operand_alone(steps, staging.ref, first) else None), value


def _is_for_operand_alone(steps: Sequence[PlannedStep], x: int, first: int) -> bool:
    """Whether the steps before matrix step `first` serve only to make its operand."""
    if any(step.out != ABSENT for step in steps[:first]):
        return False
    for step in steps[first:]:
        read = step.reads[1:] if step.matrix and step.args[0] == x else step.reads
        if any(RESULT_REF <= ref < RESULT_REF + first for ref in read):
            return False
    return True


def _formula(ref: int, steps: Sequence[PlannedStep], form: Form, inputs: list[int]) -> Hashable | None:
    """The formula of a ref over `inputs`, to which inputs are added. None where it depends on the task's params or on
    weights."""
    if ref < RESULT_REF:
        if form.written[ref] is not None:
            return None
        if ref not in inputs:
            inputs.append(ref)
        return "input", inputs.index(ref)
    step = steps[ref - RESULT_REF]
    if step.matrix or any(inherited(step, form, name) for name in _takes(step)):
        return None
    args = tuple(_formula(arg, steps, form, inputs) for arg in step.args)
    if None in args:
        return None
    return step.op, args, tuple(sorted(step.params.items())), step.result.dtype, step.result.shape


def _takes(step: PlannedStep) -> frozenset[str]:
    """The task's params that the step's op may use."""
    row = OPERATIONS[step.op]
    return INHERITED_PARAMS & {*row.params, *row.options}


def in_slices(steps: Sequence[PlannedStep], form: Form, staged_bytes: int = 0) -> list[PlannedStep]:
    """The steps, with each product's slices of K. `staged_bytes` are the variant's. Raises InvalidProgramError.

    Slices of several rows that quantised matrices multiply may fill the staging area, if that is larger than the least
    one and the steps keep nothing else there.
    """
    alone = all(step.out != ABSENT and not step.attends for step in steps)
    area = staged_bytes if alone and staged_bytes > MIN_STAGED_BYTES else 0
    return [
        replace(step, sliced=_slice_depth(step, form, area)) if step.matrix and step.args[0] < RESULT_REF else step
        for step in steps
    ]


def _slice_depth(step: PlannedStep, form: Form, area: int) -> int | None:
    """The columns of K of each slice of a matrix step of an input; None for all of K at once."""
    x, depth = step.args[0], int(step.params["K"])
    value, coded = form.inputs[x], step.coded is not None
    each = slice_depth(value.dtype, value.numel // depth, depth, coded, area if coded else 0)
    if each >= depth:
        return None
    if form.written[x] is not None:
        raise InvalidProgramError(f"writes its operand of {value.nbytes} bytes, which it multiplies in slices")
    return each
