"""The operands that a task's matrix steps find in the staging area, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from flywheel.ir import DType, InstructionKind
from flywheel.plan.formats import Code
from flywheel.plan.staging import FRAGMENT_K, operand_stride
from flywheel.plan.step import RESULT_REF, Form, PlannedStep, look, x_rows


class Held(Enum):
    """How an operand lies in the staging area."""

    ELEMENTS = auto()
    DIGITS = auto()
    """One row, as products of int4 take it."""
    HALVES = auto()
    """One row of BF16 as F16, as products of F8E4M3 take it."""


@dataclass(frozen=True, slots=True)
class Staging:
    """One operand at the start of the staging area. Matrix steps `steps` multiply it. It stays from step `start` to
    `end`.

    With `in_place`, the step that makes the operand writes it there. With `scaled_later`, that step is a norm, and the
    products apply its rows' scales.
    """

    ref: int
    steps: tuple[int, ...]
    nbytes: int
    start: int
    end: int
    in_place: bool
    scaled_later: bool
    held: Held


def stagings_of(steps: Sequence[PlannedStep], form: Form) -> tuple[Staging, ...]:
    """The stagings of a task: each run of matrix steps with one operand stages it once.

    In a task with an attention, every matrix step stages anew, so that no matrix warp runs ahead into the attention.
    """
    runs = _runs(steps, form)
    stagings: list[Staging] = []
    for number, members in enumerate(runs):
        until = runs[number + 1][0] if number + 1 < len(runs) else None
        free_from = stagings[-1].end + 1 if stagings else 0
        stagings.append(_staging(steps, form, members, free_from, until))
    return tuple(stagings)


def _runs(steps: Sequence[PlannedStep], form: Form) -> list[tuple[int, ...]]:
    """Runs of matrix steps; each multiplies one staged operand."""
    reuse = not any(step.attends for step in steps)
    runs: list[tuple[int, ...]] = []
    last: tuple[object, ...] | None = None  # ref and K of the operand of the last run, and how it is held
    for index, step in enumerate(steps):
        if step.matrix:
            x = step.args[0]
            operand = x, step.params["K"], _held(step, steps, form)
            stays = not step.streams and not (x < RESULT_REF and form.written[x] is not None)
            if reuse and stays and operand == last:
                runs[-1] = (*runs[-1], index)
            else:
                runs.append((index,))
            last = operand
    return runs


def _staging(
    steps: Sequence[PlannedStep], form: Form, members: tuple[int, ...], free_from: int, until: int | None
) -> Staging:
    """The staging of a run. The area is free from step `free_from` on, and must be free again at step `until` (None:
    the end).

    The step that makes the operand writes it in place where that is possible. No matrix warp may begin while an
    attention uses the area of the matrix warps' partials.
    """
    first, last = steps[members[0]], members[-1]
    x, made = first.args[0], first.args[0] - RESULT_REF
    value = look(x, steps, form)
    rows = x_rows(first, steps, form)
    nbytes = value.dtype.nbytes(rows * operand_stride(rows, first.depth))
    norms = made >= 0 and _norms_alone(steps, made, members)
    held = _held(first, steps, form)
    in_place = (
        made >= free_from
        and first.depth % FRAGMENT_K == 0
        and (rows == 1 or norms)
        and (held is Held.ELEMENTS or _multiplied_alone(steps, made, members))
        and all(not each.attends for each in steps[made + 1 : members[0]])
        and (until is None or max(last, last_uses(steps)[made]) < until)
    )
    if in_place:
        last = max(last, last_uses(steps)[made])
    end = len(steps) if until is None else last
    later = in_place and norms and value.dtype is DType.BF16  # unscaled values may exceed F16
    return Staging(x, members, nbytes, made if in_place else members[0], end, in_place, later, held)


def _held(step: PlannedStep, steps: Sequence[PlannedStep], form: Form) -> Held:
    """How a matrix step takes its operand."""
    if step.coded is None or x_rows(step, steps, form) != 1:
        return Held.ELEMENTS
    if step.coded.coding.code is Code.I4:
        return Held.DIGITS
    halves = step.coded.coding.code is Code.F8 and look(step.args[0], steps, form).dtype is DType.BF16
    return Held.HALVES if halves else Held.ELEMENTS


def _multiplied_alone(steps: Sequence[PlannedStep], made: int, members: Sequence[int]) -> bool:
    """Whether only the matrix steps `members` read the result of step `made`, as their operand."""
    x = RESULT_REF + made
    readers = {index for index, step in enumerate(steps) if x in step.reads}
    return readers == set(members) and all(x not in steps[index].reads[1:] for index in members)


def _norms_alone(steps: Sequence[PlannedStep], made: int, members: Sequence[int]) -> bool:
    """Whether a norm with weights makes rows that only the matrix steps `members` read, so that the rows may have the
    products' stride."""
    norm = steps[made]
    if len(norm.args) < 2:
        return False
    same = all(steps[index].params["K"] == norm.params.get("hidden") for index in members)
    return norm.op is InstructionKind.RMSNORM and same and _multiplied_alone(steps, made, members)


def last_uses(steps: Sequence[PlannedStep]) -> list[int]:
    """The last step that reads each step's result; the step itself where none does."""
    last = list(range(len(steps)))
    for index, step in enumerate(steps):
        for ref in step.reads:
            if ref >= RESULT_REF:
                last[ref - RESULT_REF] = index
    return last
