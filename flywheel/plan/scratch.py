"""Assigns places to values between steps: scratch results, on chip or spilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import InvalidProgramError
from flywheel.plan.operands import last_uses
from flywheel.plan.routine import Routine
from flywheel.plan.staging import WORK_BYTES, work_bytes
from flywheel.plan.step import ABSENT, RESULT_REF

SPILLED: Final = 1 << 30
"""Added to a scratch offset that counts from the SM's slice of the workspace instead of from the staging area."""

ALIGNMENT: Final = 16
"""Alignment of a scratch result in bytes: the width of the kernels' loads."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The byte offset of each step's scratch result, and the number of bytes spilled."""

    offsets: tuple[int, ...]
    spilled_bytes: int


def place_values(routine: Routine, staged_bytes: int, vector_warps: int) -> Placement:
    """Place the steps' results in a staging area of `staged_bytes`. A view has no place of its own.

    No value shares bytes with one that is still needed. The last staged operand stays until the task ends, for the SM's
    next task. Raises InvalidProgramError for an operand that is larger than the area.
    """
    steps, stagings = routine.steps, routine.stagings
    last_use = last_uses(steps)
    attended = [work_bytes(step.params["head_dim"], vector_warps) for step in steps if step.attends]
    limit = staged_bytes if stagings and not attended else staged_bytes - max(attended, default=WORK_BYTES)
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
        elif index not in routine.views:
            offset = _free(spilled, index, last_use[index], nbytes)
            if offset + nbytes >= SPILLED:
                raise InvalidProgramError(f"step {index} makes {step.result.nbytes} bytes of scratch")
            offsets[index] = SPILLED + offset
            spilled.append((index, last_use[index], offset, offset + nbytes))
    return Placement(tuple(offsets), max((end for *_, end in spilled), default=0))


def _free(taken: Sequence[tuple[int, int, int, int]], start: int, end: int, nbytes: int) -> int:
    """The lowest offset with `nbytes` free between steps `start` and `end`."""
    offset = 0
    for low, high in sorted((low, high) for first, last, low, high in taken if first <= end and start <= last):
        if offset + nbytes <= low:
            break
        offset = max(offset, _aligned(high))
    return offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
