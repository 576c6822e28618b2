"""Attentions whose rows of the KV caches the loader streams, as it streams weights, ahead of the queries.

All rows before a sequence's position are in its caches when a launch starts. So they wait for nothing, if no task of
the launch writes them. Source: docs/vm.md, "The past as a stream".
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import BufferKind, DType, InstructionKind, KvRows
from flywheel.plan.kernels import MAX_STREAMED_HEADS, USUAL_HEAD_DIMS
from flywheel.plan.nodes import Grouping, Node
from flywheel.plan.routine import Routine
from flywheel.plan.routines import Routines
from flywheel.plan.step import RESULT_REF
from flywheel.plan.variant import KernelVariant

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_K = InstructionKind

BLOCK_ROWS: Final = 16
"""Rows of a cache that a warp multiplies at once."""

_ALIGNED: Final = 8
"""Elements of a half type in 16 bytes, which the kernel loads of queries at once."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedRows:
    """Streamed rows, a task each, as columns. `task` counts as in `Stream`; `keys` and `values` are buffer rows.

    The rows are `kv_len` from `kv_start` on, as the task has them with the token at `pos`. `window` is 0 without one.
    """

    task: Ints
    keys: Ints
    values: Ints
    sequence: Ints
    row_bytes: Ints
    chunk_rows: Ints
    pos: Ints
    kv_start: Ints
    kv_len: Ints
    window: Ints


def chunk_rows(variant: KernelVariant, row_bytes: int) -> int:
    """Rows of keys, and as many of values, that fill a chunk."""
    return variant.chunk_bytes // 32 * 16 // row_bytes // BLOCK_ROWS * BLOCK_ROWS


def streamed_tasks(grouping: Grouping, made: Routines, variant: KernelVariant) -> Bools:
    """Which tasks of the program's list have their past streamed: none unless the schedule asks for it."""
    if not variant.streams_past:
        return np.zeros(len(grouping.node_of), np.bool_)
    forms = np.array([_streams(routine, made.dtype, variant) for routine in made.by_form], np.bool_)
    nodes = np.array([forms[node.form] for node in made.nodes], np.bool_)
    nodes &= ~_written_otherwise(grouping, made)
    return np.asarray(nodes[grouping.node_of], np.bool_)


def past_of(grouping: Grouping, made: Routines, variant: KernelVariant, place: Ints, streamed: Bools) -> StreamedRows:
    """What the loader streams for the `streamed` ones of the tasks at `place` in the program's list."""
    task = np.flatnonzero(streamed[place])
    node, record = grouping.node_of[place[task]], grouping.params_of[place[task]]
    keys, values, row_bytes = (
        np.array(column, np.int64)[node] for column in zip(*(_facts(each, made) for each in made.nodes), strict=True)
    )
    pos, start, length, window = (
        np.array([each.get(name, 0) for each in grouping.params], np.int64)[record]
        for name in ("pos", "kv_start", "kv_len", "window")
    )
    fitting = np.array([chunk_rows(variant, int(each)) if each else 0 for each in row_bytes], np.int64)
    sequence = made.position_rows[record].astype(np.int64)
    return StreamedRows(task, keys, values, sequence, row_bytes, fitting, pos, start, length, window)


def _facts(node: Node, made: Routines) -> tuple[int, int, int]:
    """(buffer row of the keys, of the values, bytes of a row) of a node whose last step attends; else zeros."""
    routine = made.by_form[node.form]
    refs = _operands(routine)
    if not refs:
        return 0, 0, 0
    keys, values = (node.inputs[ref] for ref in refs)
    return keys, values, routine.steps[-1].params["head_dim"] * made.dtype.nbytes(1)


def _operands(routine: Routine) -> tuple[int, ...]:
    """The inputs that are the keys and the values of a routine's attention; () without them."""
    if not routine.steps or routine.steps[-1].op is not _K.ATTENTION_TILE:
        return ()
    refs = routine.steps[-1].args[1:3]
    return refs if all(ref < RESULT_REF for ref in refs) else ()


def _streams(routine: Routine, dtype: DType, variant: KernelVariant) -> bool:
    """Whether a routine's last step attends to past rows of one KV head's caches, and does so on tensor cores."""
    form = routine.form
    if form.kv_rows != KvRows.PAST or not _operands(routine) or dtype is DType.F32:
        return False
    step = routine.steps[-1]
    params = step.params
    caches = [form.inputs[ref] for ref in step.args[1:]]
    maker = routine.steps[step.args[0] - RESULT_REF] if step.args[0] >= RESULT_REF else None
    query = form.inputs[step.args[0]] if maker is None else maker.result
    aligned = maker is None or maker.op is not _K.COPY or maker.params.get("n_off", 1) % _ALIGNED == 0
    head_dim: int = params["head_dim"]
    return (
        len(step.args) == 3
        and {"pos", "kv_len", "kv_start"} <= form.given
        and head_dim in USUAL_HEAD_DIMS
        and params["n_kv_heads"] == 1
        and params["n_heads"] <= MAX_STREAMED_HEADS
        and query.dtype is dtype
        and all(each.dtype is dtype and each.kind is BufferKind.KV_CACHE for each in caches)
        and chunk_rows(variant, head_dim * dtype.nbytes(1)) > 0
        and aligned
        and not routine.matrices
        and sum(each.attends for each in routine.steps) == 1
    )


def _written_otherwise(grouping: Grouping, made: Routines) -> Bools:
    """By node: whether some task may write rows of its caches that stand before its sequence's position."""
    pairs = np.unique(grouping.node_of * len(grouping.params) + grouping.params_of)
    nodes, records = (each.tolist() for each in np.divmod(pairs, len(grouping.params)))
    caches = [_operands(made.by_form[each.form]) for each in made.nodes]
    writers: dict[int, set[tuple[int, int] | None]] = {}
    readers: dict[int, set[tuple[int, int]]] = {}
    for number, record in zip(nodes, records, strict=True):
        node, params = made.nodes[number], grouping.params[record]
        routine = made.by_form[node.form]
        where = _where(params)
        appends = {step.out for step in routine.steps if step.op is _K.KV_APPEND}
        own = any({"pos"} & step.params.keys() for step in routine.steps)
        for place, row in enumerate(node.outputs):
            if routine.form.outputs[place].kind is BufferKind.KV_CACHE:
                writers.setdefault(row, set()).add(where if place in appends and not own else None)
        if routine.form.kv_rows == KvRows.PAST:
            readers.setdefault(number, set()).add(where)
    found = np.zeros(len(made.nodes), np.bool_)
    for number, seen in readers.items():
        node = made.nodes[number]
        written = [each for ref in caches[number] for each in writers.get(node.inputs[ref], ())]
        found[number] = any(writer is None or _may_write(writer, seen) for writer in written)
    return found


def _may_write(writer: tuple[int, int], readers: Set[tuple[int, int]]) -> bool:
    """Whether a row that an append writes may be before a reader's position."""
    return any(writer[0] != sequence or writer[1] < pos for sequence, pos in readers)


def _where(params: Mapping[str, Any]) -> tuple[int, int]:
    """(sequence, position) of a task's token."""
    return params.get("sequence", 0), params.get("pos", 0)

