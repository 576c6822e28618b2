"""Products in slices of K, a matrix step for each: of an operand that is longer than the staging area, or, where the
program asks for it, of one whose tiles come one after the other.

Slices follow each other. Each but the last leaves its sums in scratch, in fp32, and each but the first goes on with
those of the one before it; bias, rounding and epilogue are the last one's. An operand that the task's own steps make is
never cut: it has to fit. Slices of a long operand take turns at the start of the staging area; those of one that fits
lie side by side there, and each is multiplied as soon as it is staged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from flywheel.ir import DType, InstructionKind
from flywheel.ir.variant import SLICE_K, slice_depth
from flywheel.vm.abi import ABSENT, RESULT_REF, Epilogue
from flywheel.vm.pack.step import Form, Operand, Step


def in_slices(steps: Sequence[Step], form: Form, x_slices: int = 1) -> list[Step]:
    """The steps, products that are cut slice by slice, with refs that count them. `x_slices` is the variant's."""
    made: list[Step] = []
    places: dict[int, int] = {}
    attends = any(step.op is InstructionKind.ATTENTION_TILE for step in steps)
    uses = Counter(step.args[0] for step in steps if step.matrix)
    for index, step in enumerate(steps):
        args = tuple(places.get(ref, ref) for ref in step.args)
        moved = replace(step, args=args, other=places.get(step.other, step.other))
        side_by_side = 1 if attends or uses[step.args[0]] > 1 else x_slices
        made += _slices(moved, form, RESULT_REF + len(made), side_by_side) if step.matrix else [moved]
        places[RESULT_REF + index] = RESULT_REF + len(made) - 1
    return made


def _slices(step: Step, form: Form, ref: int, x_slices: int) -> Iterator[Step]:
    """A matrix step, or its slices, the first of which has ref `ref`."""
    x, depth = step.args[0], int(step.params["K"])
    if x >= RESULT_REF:
        yield step
        return
    rows = form.inputs[x].numel // depth
    each = slice_depth(form.inputs[x].dtype, rows, depth)
    side_by_side = each == depth and rows == 1 and x_slices > 1 and form.written[x] is None
    if side_by_side:
        each = SLICE_K * -(-depth // (SLICE_K * x_slices))
    if each >= depth:
        yield step
        return
    width = step.result.numel // rows
    sums = Operand(DType.F32, (rows, width if form.recipe is not None else min(width, form.widest)))
    carried = ABSENT
    for start, end in pairwise((*range(0, depth, each), depth)):
        slice_ = replace(step, columns=(start, end), carried=carried, side_by_side=side_by_side)
        if end < depth:
            slice_ = replace(slice_, args=step.args[:2], out=ABSENT, result=sums, epilogue=Epilogue.NONE, other=ABSENT)
        yield slice_
        carried, ref = ref, ref + 1
