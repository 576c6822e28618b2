"""Finds the steps for the new row of one KV head that one kernel computes together.

The steps are ROPE and KV_APPEND of the key, KV_APPEND of the value, ROPE of the queries, and ATTENTION_TILE, the task's
last step. No other step reads their scratch results. If both key and queries have a norm before the ROPE, the kernel
also computes the two norms. If the attention is to the new row alone, the kernel of the key's ROPE does all steps;
otherwise the attention's kernel does, which ends at once where it sees no row at all. Source: docs/vm.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from flywheel.ir import BufferKind, DType, InstructionKind, KvRows
from flywheel.plan.kernels import HEAD_DIMS
from flywheel.plan.step import RESULT_REF, Form, PlannedStep, inherited, look
from flywheel.plan.turning import find_norm, is_turn, turns_queries

_K = InstructionKind

_OPS: Final = (_K.ROPE, _K.KV_APPEND, _K.KV_APPEND, _K.ROPE, _K.ATTENTION_TILE)


@dataclass(frozen=True, slots=True)
class NewRow:
    """Indices of the steps in their task. Either both norms have an index or neither. `alone`: the attention is to the
    new row alone."""

    key_rope: int
    key: int
    value: int
    query_rope: int
    attention: int
    alone: bool
    key_norm: int | None = None
    query_norm: int | None = None


def find_new_row(steps: Sequence[PlannedStep], form: Form, dtype: DType, views: AbstractSet[int]) -> NewRow | None:
    """The new row that the steps end with; None if they do not. `views` are steps that do not run, and `dtype` is the
    program's."""
    run = [place for place in range(len(steps)) if place not in views][-len(_OPS) :]
    if form.kv_rows == KvRows.PAST or form.misses or tuple(steps[place].op for place in run) != _OPS:
        return None
    key_rope, key, value, query_rope, attention = run
    row = NewRow(key_rope, key, value, query_rope, attention, alone=form.kv_rows == KvRows.NEW)
    if not row.alone and not turns_queries(row.attention, steps, form, dtype):
        return None
    if row.key != row.key_rope + 1 or row.attention != len(steps) - 1:
        return None
    norms = [find_norm(rope, steps, form, dtype, views) for rope in (row.key_rope, row.query_rope)]
    if None not in norms:
        row = replace(row, key_norm=norms[0], query_norm=norms[1])
    return row if _attends(row, steps, form) and _fits(row, steps, form, dtype, views) else None


def _attends(row: NewRow, steps: Sequence[PlannedStep], form: Form) -> bool:
    """Whether the attention reads the caches that the appends write, with the turned queries.

    If `row.alone`, the attention must read that row only.
    """
    attention, key, value = steps[row.attention], steps[row.key], steps[row.value]
    return (
        len(attention.args) == 3
        and attention.args[0] == RESULT_REF + row.query_rope
        and attention.params["n_kv_heads"] == 1
        and attention.params.get("kv_len", 1) > 0
        and key.args[0] == RESULT_REF + row.key_rope
        and all(_writes(step, cache, form) for step, cache in zip((key, value), attention.args[1:], strict=True))
        and (not row.alone or all(inherited(attention, form, name) for name in ("kv_start", "kv_len")))
        and all(inherited(step, form, "pos") for step in (key, value))
    )


def _writes(append: PlannedStep, cache: int, form: Form) -> bool:
    """Whether a KV_APPEND writes the cache that is this operand of the attention."""
    return (
        cache < RESULT_REF
        and form.written[cache] == append.out
        and form.outputs[append.out].kind is BufferKind.KV_CACHE
    )


def _fits(row: NewRow, steps: Sequence[PlannedStep], form: Form, dtype: DType, views: AbstractSet[int]) -> bool:
    """Whether the kernel takes the operands: heads of one size, in the program's float type."""
    attention, appends = steps[row.attention], (steps[row.key], steps[row.value])
    head_dim: int = attention.params["head_dim"]
    turned, normed = steps[row.query_rope], row.key_norm is not None

    def is_source(ref: int, numel: int) -> bool:
        """Whether `ref` is made before these steps, is not written by the task, and can be loaded two elements at a
        time."""
        made, x = ref - RESULT_REF, look(ref, steps, form)
        early = form.written[ref] is None if made < 0 else made < row.key_rope or made in views
        even = made not in views or steps[made].params.get("n_off", 1) % 2 == 0
        return early and even and x.numel == numel and x.dtype is dtype

    def is_rope(rope: PlannedStep, numel: int) -> bool:
        turns = is_turn(rope, numel, head_dim, steps, form, dtype)
        return turns and is_source(rope.args[0], numel) and (not normed or is_source(_made(rope, steps).args[0], numel))

    # The kernel of an attention to older rows runs after steps whose results may lie where a scratch value did.
    value = steps[row.value].args[0]
    stays = row.alone or value < RESULT_REF or value - RESULT_REF in views
    return (
        head_dim in HEAD_DIMS
        and stays
        and (turned.args[1], turned.params) == (steps[row.key_rope].args[1], steps[row.key_rope].params)
        and is_rope(steps[row.key_rope], head_dim)
        and is_source(value, head_dim)
        and is_rope(turned, attention.params["n_heads"] * head_dim)
        and all(step.result.numel == step.result.shape[0] * head_dim for step in appends)
        and all(form.outputs[step.out].dtype is dtype for step in appends)
    )


def _made(step: PlannedStep, steps: Sequence[PlannedStep]) -> PlannedStep:
    """The step that makes the first operand of `step`."""
    return steps[step.args[0] - RESULT_REF]
