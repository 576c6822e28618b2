"""Splits products into slices of K.

The input may be larger than the staging area, or the program asks for slices because the tiles of an input arrive one
after the other. A slice of a large input replaces the slice before it once that one is multiplied. Slices of an input
that fits lie side by side, and each is multiplied as soon as it arrives. An operand that the task's own steps make is
never split: it must fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flywheel.errors import InvalidProgramError
from flywheel.ir import InstructionKind
from flywheel.plan.formats import UNIT_K
from flywheel.plan.staging import MIN_STAGED_BYTES, SLICE_K, Slices, slices_of
from flywheel.plan.step import ABSENT, RESULT_REF, Form, PlannedStep


def in_slices(steps: Sequence[PlannedStep], form: Form, x_slices: int = 1, staged_bytes: int = 0) -> list[PlannedStep]:
    """The steps, with each product's slices of K. `x_slices` and `staged_bytes` are the variant's. Raises
    InvalidProgramError.

    Slices of several rows that quantised matrices multiply may fill the staging area, if that is larger than the least
    one and the steps keep nothing else there.
    """
    attends = any(step.op is InstructionKind.ATTENTION_TILE for step in steps)
    alone = not attends and all(step.out != ABSENT for step in steps)
    area = staged_bytes if alone and staged_bytes > MIN_STAGED_BYTES else 0
    uses = Counter(step.args[0] for step in steps if step.matrix)
    return [
        replace(step, slices=_slices(step, form, 1 if attends or uses[step.args[0]] > 1 else x_slices, area))
        if step.matrix and step.args[0] < RESULT_REF
        else step
        for step in steps
    ]


def _slices(step: PlannedStep, form: Form, x_slices: int, area: int) -> Slices | None:
    """The slices of a matrix step of an input; None for all of K at once."""
    x, depth = step.args[0], int(step.params["K"])
    value, written = form.inputs[x], form.written[x] is not None
    rows = value.numel // depth
    each, beside = slices_of(value.dtype, rows, depth, step.coded is not None, 0 if step.coded is None else area)
    if each < depth:
        if written:
            raise InvalidProgramError(f"writes its operand of {value.nbytes} bytes, which it multiplies in slices")
        return Slices(each, beside)
    grain = SLICE_K if step.coded is None else UNIT_K
    each = grain * -(-depth // (grain * x_slices))
    return None if rows > 1 or written or each >= depth else Slices(each, -(-depth // each))
