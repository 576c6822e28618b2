"""Which tasks find their first matrix operand already staged by the task before them on their SM.

Both operands must be the same function of the same buffers. The buffers hold the same for both if no column of them is
written twice: the only write happens before each task that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flywheel.ir.access import WHOLE, Region, written_region
from flywheel.plan.handoff import columns_of
from flywheel.plan.nodes import Grouping, Node
from flywheel.plan.routine import Routine, StagedValue

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedOperands:
    """For each node: the operand that its tasks need not stage where the task before left it, and the operand that they
    leave. None where there is no such operand, or its buffers may change in between."""

    found: tuple[StagedValue | None, ...]
    left: tuple[StagedValue | None, ...]


def shared_operands(
    grouping: Grouping, nodes: Sequence[Node], routines: Sequence[Routine], once: Set[int]
) -> SharedOperands:
    """The shared operands of a program's nodes. `once` are rows of buffers of which each column is written once."""
    found, left = ([getattr(each, name) for each in routines] for name in ("skipped_x", "left_x"))
    values = [(node, value) for node in nodes if (value := left[node.form]) is not None]
    rows = {node.inputs[place] for node, value in values for place in value.inputs} - once
    rewritten = _rewritten(rows, nodes, grouping)

    def lasting(node: Node, value: StagedValue | None) -> StagedValue | None:
        changes = value is not None and not rewritten.isdisjoint([node.inputs[place] for place in value.inputs])
        return None if changes else value

    return SharedOperands(
        tuple([lasting(node, found[node.form]) for node in nodes]),
        tuple([lasting(node, left[node.form]) for node in nodes]),
    )


def staged_tasks(shared: SharedOperands, nodes: Sequence[Node], node_of: Ints, sms: Ints) -> npt.NDArray[np.bool_]:
    """Which tasks, listed SM by SM with their nodes, find their operand staged."""
    keys: dict[object, int] = {None: -1}
    found, left = (
        np.array([
            keys.setdefault(value and value.over(node.inputs), len(keys))
            for node, value in zip(nodes, values, strict=True)
        ], np.int64)[node_of]
        for values in (shared.found, shared.left)
    )  # fmt: skip
    return find_staged(found, left, sms)


def find_staged(found: Ints, left: Ints, sms: Ints) -> npt.NDArray[np.bool_]:
    """Which tasks, listed SM by SM, find their operand staged. `found` and `left` number each task's operands alike; -1
    for none."""
    marks = np.zeros(len(sms), np.bool_)
    marks[1:] = (sms[:-1] == sms[1:]) & (found[1:] >= 0) & (found[1:] == left[:-1])
    return marks


def _rewritten(rows: Set[int], nodes: Sequence[Node], grouping: Grouping) -> set[int]:
    """Which of `rows` are of buffers in which tasks write, or may write, a column more than once.

    Tiles over several rows count by their columns. Other writes count as a whole.
    """
    written: dict[int, list[Region]] = {}
    if rows.isdisjoint([row for node in nodes for row in node.outputs]):
        return set()
    sizes = np.bincount(grouping.node_of, minlength=len(nodes)).tolist()
    for node, columns, size in zip(nodes, columns_of(grouping), sizes, strict=True):
        for place, row in enumerate(node.outputs):
            if row in rows:
                tiled = not place and written_region(node.task) is not None
                written.setdefault(row, []).extend(columns if tiled else [WHOLE] * size)
    return {row for row, columns in written.items() if len(columns) > 1 and _overlap(sorted(columns))}


def _overlap(columns: Sequence[Region]) -> bool:
    return any(second[0] < first[1] for first, second in pairwise(columns))
