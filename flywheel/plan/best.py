"""Fuses argmax into the tasks that compute logits, so that SAMPLE_ARGMAX need not read the logits again.

Each of these tasks writes the maximum of its columns to a word per launch and row, by one atomic maximum for each half
of a warp. The task that samples a row comes after all of them in the program's order, and finds the index in that word.
If several GPUs share the logits, each sends its own maximum to the others. Source: docs/vm.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from flywheel.ir import ABI_MAX_ROWS, Buffer, DType, InstructionKind
from flywheel.plan.nodes import Grouping, Node
from flywheel.plan.routine import Routine
from flywheel.plan.step import RESULT_REF, Epilogue, x_rows


@dataclass(frozen=True, slots=True)
class KeptBest:
    """The nodes that keep the largest logit, the nodes that take it, and the row of the logits' buffer. `shared`: other
    GPUs have a part of the logits, and all exchange their largest one."""

    keeping: tuple[int, ...]
    taking: tuple[int, ...]
    logits: int
    shared: bool


def find_best(
    buffers: Sequence[Buffer],
    grouping: Grouping,
    nodes: Sequence[Node],
    routines: Sequence[Routine],
    arrived: Collection[int] = (),
) -> KeptBest | None:
    """The nodes that keep and take the largest logit. None if the following does not hold.

    One task samples each row of an F32 buffer, and each column of the buffer is written once, as the product of all
    rows in a matrix step. In a buffer of `arrived`, columns that no task writes come from other GPUs.
    """
    forms = {number for number, routine in enumerate(routines) if _samples(routine)}
    sampling = [index for index, node in enumerate(nodes) if node.form in forms]
    sizes = np.bincount(grouping.node_of, minlength=len(nodes))
    if not 1 <= len(sampling) <= ABI_MAX_ROWS or any(sizes[index] != 1 for index in sampling):
        return None
    logits = nodes[sampling[0]].inputs[0]
    buffer, rows = buffers[logits], len(sampling)
    taken = [_sampled_row(nodes[index], routines[nodes[index].form], buffer.numel // rows) for index in sampling]
    if buffer.dtype is not DType.F32 or any(nodes[index].inputs[0] != logits for index in sampling):
        return None
    if set(taken) != ({None} if rows == 1 else set(range(rows))):
        return None
    writers = [index for index, node in enumerate(nodes) if logits in node.outputs]
    makers = [(nodes[index], routines[nodes[index].form]) for index in writers]
    if not makers or not all(_multiplies(node, routine, logits, rows) for node, routine in makers):
        return None
    widths = np.array([params.get("N_tile", 0) for params in grouping.params], np.int64)[grouping.params_of]
    writes = np.zeros(len(nodes), np.bool_)
    writes[writers] = True
    made = widths[writes[grouping.node_of]].sum() * rows
    if made != buffer.numel and buffer.id not in arrived:
        return None
    return KeptBest(tuple(writers), tuple(sampling), logits, buffer.id in arrived)


def _samples(routine: Routine) -> bool:
    return len(routine.steps) > 0 and routine.steps[-1].op is InstructionKind.SAMPLE_ARGMAX


def _sampled_row(node: Node, routine: Routine, width: int) -> int | None:
    """The row of `width` logits that a task samples through a view, if it writes that row's own column. None if it
    samples the only row as a whole; -1 if it does neither."""
    steps = routine.steps
    if len(steps) == 1:
        return None if steps[0].result.numel == 1 else -1
    view, last = steps[0], steps[-1]
    if len(steps) != 2 or 0 not in routine.views or last.args[0] != RESULT_REF or last.result.numel != 1:
        return -1
    row = int(node.task.params.get("n_off", -1))
    shown = view.params.get("n_off"), view.params.get("N_tile")
    return row if shown == (row * width, width) and node.task.params.get("N_tile") == 1 else -1


def _multiplies(node: Node, routine: Routine, logits: int, rows: int) -> bool:
    """Whether a task's last step writes the logits as a product of `rows` rows without an addition."""
    last = routine.steps[-1]
    return (
        node.outputs == (logits,)
        and last.matrix
        and last.out == 0
        and last.epilogue is Epilogue.NONE
        and x_rows(last, routine.steps, routine.form) == rows
        and [step.out for step in routine.steps].count(0) == 1
    )
