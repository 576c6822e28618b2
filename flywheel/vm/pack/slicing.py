"""Products in slices of K, a matrix step for each: of an operand that is longer than the staging area, or, where the
program asks for it, of one whose tiles come one after the other.

Slices follow each other. Each but the last leaves its sums in scratch, in fp32, and each but the first goes on with
those of the one before it; bias, rounding and epilogue are the last one's. An operand that the task's own steps make is
never cut: it has to fit. Slices of a long operand take turns in the staging area, where two of them lie side by side,
each staged while the one before it is multiplied, unless they are very many; those of one that fits are all there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from flywheel.ir import DType, InstructionKind
from flywheel.ir.variant import SLICE_K, slices_of
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
        alone = not attends and uses[step.args[0]] == 1
        made += _slices(moved, form, RESULT_REF + len(made), alone, x_slices) if step.matrix else [moved]
        places[RESULT_REF + index] = RESULT_REF + len(made) - 1
    return made


def _slices(step: Step, form: Form, ref: int, alone: bool, x_slices: int) -> Iterator[Step]:
    """A matrix step, or its slices, the first of which has ref `ref`; `alone` in multiplying its operand."""
    x, depth = step.args[0], int(step.params["K"])
    if x >= RESULT_REF:
        yield step
        return
    rows = form.inputs[x].numel // depth
    each, beside = slices_of(form.inputs[x].dtype, rows, depth)
    alone = alone and form.written[x] is None
    if each == depth and rows == 1 and alone:
        each, beside = SLICE_K * -(-depth // (SLICE_K * x_slices)), x_slices
    if each >= depth:
        yield step
        return
    width = step.result.numel // rows
    sums = Operand(DType.F32, (rows, width if form.recipe is not None else min(width, form.widest)))
    carried = ABSENT
    for number, (start, end) in enumerate(pairwise((*range(0, depth, each), depth))):
        slice_ = replace(step, columns=(start, end), carried=carried, number=number, beside=beside if alone else 1)
        if end < depth:
            slice_ = replace(slice_, args=step.args[:2], out=ABSENT, result=sums, epilogue=Epilogue.NONE, other=ABSENT)
        yield slice_
        carried, ref = ref, ref + 1
