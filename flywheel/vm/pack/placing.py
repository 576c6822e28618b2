"""Where values between steps live: staged operands of matrix steps, scratch results, and what is spilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import InvalidProgramError
from flywheel.ir import DType, InstructionKind
from flywheel.plan.staging import FRAGMENT_K, WORK_BYTES, operand_stride
from flywheel.vm.abi import ABSENT, RESULT_REF, SPILLED, StepFlag
from flywheel.vm.pack.step import Form, Step, look

ALIGNMENT: Final = 16
"""Of a scratch result: the width of the kernels' loads."""


@dataclass(frozen=True, slots=True)
class Staging:
    """One operand at the start of the staging area, for matrix steps `steps`; it stays from step `start` to `end`.

    `scaled_later` says that a norm makes it, whose rows' scales go to the products instead.
    """

    ref: int
    steps: tuple[int, ...]
    nbytes: int
    start: int
    end: int
    in_place: bool
    scaled_later: bool

    def flag(self, step: int) -> StepFlag:
        """How matrix step `step` treats the operand."""
        if step != self.steps[0]:
            return StepFlag.REUSE_X
        return StepFlag.X_IN_PLACE if self.in_place else StepFlag.STAGE


@dataclass(frozen=True, slots=True)
class Placement:
    """Stagings in order, the byte offset of each step's scratch result, and the bytes that were spilled."""

    stagings: tuple[Staging, ...]
    offsets: tuple[int, ...]
    spilled_bytes: int

    def is_in_place(self, step: int) -> bool:
        """Whether a step's result is a staged operand where it is."""
        return any(staging.in_place and staging.ref == RESULT_REF + step for staging in self.stagings)

    def staging(self, step: int) -> Staging:
        """The staging that matrix step `step` multiplies."""
        return next(staging for staging in self.stagings if step in staging.steps)


def place_values(
    steps: Sequence[Step], form: Form, staged_bytes: int, views: frozenset[int] = frozenset()
) -> Placement:
    """Place what the steps make, in a staging area of `staged_bytes`; `views` only name what lies elsewhere, and where
    they do not fit, they have no place.

    Nothing shares bytes with what is still needed; the last staged operand stays until the task ends, for the SM's
    next one. Raises InvalidProgramError for an operand that is longer than the area.
    """
    last_use = _last_uses(steps)
    attends = any(step.op is InstructionKind.ATTENTION_TILE for step in steps)
    stagings = _stagings(steps, form, last_use, reuse=not attends)
    limit = staged_bytes if stagings and not attends else staged_bytes - WORK_BYTES
    for staging in stagings:
        if staging.nbytes > limit:
            made = ", whole since the task makes it" if staging.ref >= RESULT_REF else ""
            raise InvalidProgramError(f"stages an operand of {staging.nbytes} bytes in an area of {limit}{made}")
    offsets = [ABSENT] * len(steps)
    taken = [(staging.start, staging.end, 0, staging.nbytes) for staging in stagings]
    spilled: list[tuple[int, int, int, int]] = []
    in_place = {staging.ref - RESULT_REF for staging in stagings if staging.in_place}
    for index, step in enumerate(steps):
        if step.out != ABSENT:
            continue
        if index in in_place:
            offsets[index] = 0
            continue
        nbytes = _aligned(step.result.nbytes)
        offset = _free(taken, index, last_use[index], nbytes)
        if offset + nbytes <= limit:
            offsets[index] = offset
            taken.append((index, last_use[index], offset, offset + nbytes))
        elif index not in views:
            offset = _free(spilled, index, last_use[index], nbytes)
            if offset + nbytes >= SPILLED:
                raise InvalidProgramError(f"step {index} makes {step.result.nbytes} bytes of scratch")
            offsets[index] = SPILLED + offset
            spilled.append((index, last_use[index], offset, offset + nbytes))
    return Placement(stagings, tuple(offsets), max((end for *_, end in spilled), default=0))


def _last_uses(steps: Sequence[Step]) -> list[int]:
    """The last step that reads each step's result; itself where none does."""
    last = list(range(len(steps)))
    for index, step in enumerate(steps):
        for ref in step.reads:
            if ref >= RESULT_REF:
                last[ref - RESULT_REF] = index
    return last


def _stagings(steps: Sequence[Step], form: Form, last_use: Sequence[int], reuse: bool) -> tuple[Staging, ...]:
    """Runs of matrix steps that multiply the same operand, which is staged once for each run.

    Without `reuse` every matrix step stages anew, so that no matrix warp runs ahead into what follows it.
    """
    runs: list[tuple[tuple[object, ...], list[int]]] = []  # (ref and K of the operand, steps)
    for index, step in enumerate(steps):
        if step.matrix:
            x = step.args[0]
            operand = x, step.params["K"]
            stays = not step.streams and not (x < RESULT_REF and form.written[x] is not None)
            if reuse and stays and runs and runs[-1][0] == operand:
                runs[-1][1].append(index)
            else:
                runs.append((operand, [index]))
    stagings: list[Staging] = []
    for number, (_, members) in enumerate(runs):
        step = steps[members[0]]
        x, depth = step.args[0], step.depth
        value = look(x, steps, form)
        rows = value.numel // int(step.params["K"])
        staged = step.beside * operand_stride(rows, depth) if step.streams else operand_stride(rows, step.params["K"])
        nbytes = value.dtype.nbytes(rows * staged)
        until = runs[number + 1][1][0] if number + 1 < len(runs) else None
        end = len(steps) if until is None else members[-1]
        made = x - RESULT_REF
        in_place = x >= RESULT_REF and depth % FRAGMENT_K == 0
        norms = x >= RESULT_REF and _norms_alone(steps, made, members)
        in_place = in_place and (rows == 1 or norms)
        # It is announced where it is made: no matrix warp may begin while an attention has their partials for itself.
        between = {each.op for each in steps[made + 1 : members[0]]} if in_place else set()
        in_place = in_place and InstructionKind.ATTENTION_TILE not in between
        if in_place:
            end = max(end, last_use[made])
            in_place = (until is None or end < until) and (not stagings or stagings[-1].end < made)
        if not in_place:
            end = len(steps) if until is None else members[-1]
        start = made if in_place else members[0]
        later = in_place and norms and value.dtype is DType.BF16  # F16 has no room for what is not scaled
        stagings.append(Staging(x, tuple(members), nbytes, start, end, in_place, later))
    return tuple(stagings)


def _norms_alone(steps: Sequence[Step], made: int, members: Sequence[int]) -> bool:
    """Whether a norm makes rows that matrix steps `members` alone read: then they may lie apart as those have them."""
    norm = steps[made]
    x = RESULT_REF + made
    readers = {index for index, step in enumerate(steps) if x in step.reads}
    same = all(
        step.params["K"] == norm.params.get("hidden") and x not in step.reads[1:]
        for step in (steps[index] for index in members)
    )
    return norm.op is InstructionKind.RMSNORM and readers == set(members) and same


def _free(taken: Sequence[tuple[int, int, int, int]], start: int, end: int, nbytes: int) -> int:
    """The lowest offset of `nbytes` that nothing occupies between steps `start` and `end`."""
    offset = 0
    for low, high in sorted((low, high) for first, last, low, high in taken if first <= end and start <= last):
        if offset + nbytes <= low:
            break
        offset = max(offset, _aligned(high))
    return offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
