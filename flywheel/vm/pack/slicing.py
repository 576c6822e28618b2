"""Products whose operand is longer than the staging area, in slices of K: a matrix step for each of them.

Slices follow each other. Each but the last leaves its sums in scratch, in fp32, and each but the first goes on with
those of the one before it; bias, rounding and epilogue are the last one's. An operand that the task's own steps make is
never cut: it has to fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from flywheel.ir import DType
from flywheel.ir.variant import slice_depth
from flywheel.vm.abi import ABSENT, RESULT_REF, Epilogue
from flywheel.vm.pack.step import Form, Operand, Step


def in_slices(steps: Sequence[Step], form: Form) -> list[Step]:
    """The steps, long products slice by slice, with refs that count them."""
    made: list[Step] = []
    places: dict[int, int] = {}
    for index, step in enumerate(steps):
        args = tuple(places.get(ref, ref) for ref in step.args)
        moved = replace(step, args=args, other=places.get(step.other, step.other))
        made += _slices(moved, form, RESULT_REF + len(made)) if step.matrix else [moved]
        places[RESULT_REF + index] = RESULT_REF + len(made) - 1
    return made


def _slices(step: Step, form: Form, ref: int) -> Iterator[Step]:
    """A matrix step, or its slices, the first of which has ref `ref`."""
    x, depth = step.args[0], int(step.params["K"])
    if x >= RESULT_REF:
        yield step
        return
    rows = form.inputs[x].numel // depth
    each = slice_depth(form.inputs[x].dtype, rows, depth)
    if each == depth:
        yield step
        return
    width = step.result.numel // rows
    sums = Operand(DType.F32, (rows, width if form.recipe is not None else min(width, form.widest)))
    carried = ABSENT
    for start, end in pairwise((*range(0, depth, each), depth)):
        slice_ = replace(step, columns=(start, end), carried=carried)
        if end < depth:
            slice_ = replace(slice_, args=step.args[:2], out=ABSENT, result=sums, epilogue=Epilogue.NONE, other=ABSENT)
        yield slice_
        carried, ref = ref, ref + 1
