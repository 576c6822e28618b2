"""RoPE and per-head norms that an attention kernel, or the kernel of a new cache row, computes itself.

These are the ROPE of an attention's queries, and the RMSNORM of heads whose result only a ROPE reads: of queries, or of
a new row's key. Source: docs/vm.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from flywheel.ir import BufferKind, DType, InstructionKind
from flywheel.plan.kernels import HEAD_DIMS
from flywheel.plan.step import ABSENT, RESULT_REF, Form, PlannedStep, look

_K = InstructionKind

_WEIGHTS: Final = (BufferKind.WEIGHT, BufferKind.CONST)


@dataclass(frozen=True, slots=True)
class Turn:
    """An attention, the ROPE of its queries, and the RMSNORM of each head before the ROPE, if there is one."""

    attention: int
    rope: int
    norm: int | None


def turns_queries(place: int, steps: Sequence[PlannedStep], form: Form, dtype: DType) -> bool:
    """Whether step `place` (not the first) is an attention on tensor cores, and the step before it applies RoPE to its
    queries."""
    step, rope = steps[place], steps[place - 1]
    if step.op is not _K.ATTENTION_TILE or rope.op is not _K.ROPE or dtype is DType.F32:
        return False
    head_dim: int = step.params["head_dim"]
    width: int = step.params["n_heads"] * head_dim
    return (
        head_dim in HEAD_DIMS
        and len(step.args) == 3
        and step.args[0] == RESULT_REF + place - 1
        and all(ref < RESULT_REF and form.inputs[ref].dtype is dtype for ref in step.args[1:])
        and is_turn(rope, width, head_dim, steps, form, dtype)
        and look(rope.args[0], steps, form).dtype is dtype
    )


def find_turn(
    place: int, steps: Sequence[PlannedStep], form: Form, dtype: DType, views: AbstractSet[int]
) -> Turn | None:
    """The RoPE and norm that step `place` (not the first) computes itself; None if there are none. `views` are steps
    that do not run."""
    if not turns_queries(place, steps, form, dtype):
        return None
    return Turn(place, place - 1, find_norm(place - 1, steps, form, dtype, views))


def is_turn(
    rope: PlannedStep, numel: int, head_dim: int, steps: Sequence[PlannedStep], form: Form, dtype: DType
) -> bool:
    """Whether a ROPE rotates `numel` elements at one position, and its result is scratch of the program's type."""
    alike = rope.params["head_dim"] == head_dim and rope.result.dtype is dtype and rope.result.numel == numel
    return rope.out == ABSENT and alike and look(rope.args[1], steps, form).numel == 1


def find_norm(rope: int, steps: Sequence[PlannedStep], form: Form, dtype: DType, views: AbstractSet[int]) -> int | None:
    """The RMSNORM of each head before step `rope`, if the ROPE's kernel can do it; else None.

    Its input must exist before the task's first step and stay unchanged.
    """
    ref = steps[rope].args[0]
    if ref < RESULT_REF:
        return None
    norm = steps[ref - RESULT_REF]
    if norm.op is not _K.RMSNORM or norm.out != ABSENT or len(norm.args) < 2 or norm.args[1] >= RESULT_REF:
        return None
    x, w = norm.args[0], form.inputs[norm.args[1]]
    stays = form.written[x] is None if x < RESULT_REF else x - RESULT_REF in views
    alike = norm.result.dtype is dtype and look(x, steps, form).dtype is dtype and w.dtype is dtype
    whole = look(x, steps, form).numel == norm.result.numel == steps[rope].result.numel
    heads = norm.params["hidden"] == steps[rope].params["head_dim"]
    readers = sum(step.reads.count(ref) for step in steps)
    return ref - RESULT_REF if stays and alike and whole and heads and w.kind in _WEIGHTS and readers == 1 else None
