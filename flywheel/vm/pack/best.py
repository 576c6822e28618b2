"""The largest logit of each row, kept by the tasks that make logits, so that SAMPLE_ARGMAX need not read them again.

Each of those tasks adds the best of its columns to a word of the launch and the row, by one atomic maximum for each
half of a warp; the task that samples a row comes after all of them, as the program's order says, and finds the index
there. Source: docs/vm.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flywheel.ir import ABI_MAX_ROWS, DType, InstructionKind, MegakernelProgram
from flywheel.ir.access import MATRIX_OPS
from flywheel.vm.abi import RESULT_REF, Epilogue, InstructionFlag, StepFlag
from flywheel.vm.pack.nodes import Grouping, Node
from flywheel.vm.pack.template import Template


def best_flags(
    program: MegakernelProgram, grouping: Grouping, nodes: Sequence[Node], templates: Sequence[Template]
) -> Mapping[int, InstructionFlag]:
    """Nodes that keep the best of a launch, and those that take it; none where it is not as the module says.

    It is where each row of an F32 buffer is sampled by one task, and every column of it is written once, as it comes
    out of a matrix step of all rows.
    """
    sizes = np.bincount(grouping.node_of, minlength=len(nodes))
    sampling = [index for index, node in enumerate(nodes) if _samples(templates[node.form])]
    if not 1 <= len(sampling) <= ABI_MAX_ROWS or any(sizes[index] != 1 for index in sampling):
        return {}
    logits = nodes[sampling[0]].inputs[0]
    buffer, rows = program.buffers[logits], len(sampling)
    taken = [_sampled_row(nodes[index], templates[nodes[index].form], buffer.numel // rows) for index in sampling]
    if buffer.dtype is not DType.F32 or any(nodes[index].inputs[0] != logits for index in sampling):
        return {}
    if set(taken) != ({None} if rows == 1 else set(range(rows))):
        return {}
    writers = [index for index, node in enumerate(nodes) if logits in node.outputs]
    makers = [(nodes[index], templates[nodes[index].form]) for index in writers]
    if not makers or not all(_multiplies(node, template, logits, rows) for node, template in makers):
        return {}
    widths = np.array([params.get("N_tile", 0) for params in grouping.params], np.int64)[grouping.params_of]
    if widths[np.isin(grouping.node_of, writers)].sum() * rows != buffer.numel:
        return {}
    return dict.fromkeys(writers, InstructionFlag.KEEPS_BEST) | dict.fromkeys(sampling, InstructionFlag.TAKES_BEST)


def _samples(template: Template) -> bool:
    return len(template.steps) > 0 and bool(template.steps[-1]["op"] == InstructionKind.SAMPLE_ARGMAX)


def _sampled_row(node: Node, template: Template, width: int) -> int | None:
    """The row of `width` logits that a task samples by a view of it, as which it writes its own column; None where it
    samples all there are for the only one, -1 where it is neither."""
    steps = template.steps
    if len(steps) == 1:
        return None if steps[0]["out_numel"] == 1 else -1
    view, last = steps[0], steps[-1]
    if len(steps) != 2 or not view["flags"] & StepFlag.VIEW or last["args"][0] != RESULT_REF or last["out_numel"] != 1:
        return -1
    row = int(node.task.params.get("n_off", -1))
    own = view["flags"] & (StepFlag.OWN_N_OFF | StepFlag.OWN_N_TILE) == StepFlag.OWN_N_OFF | StepFlag.OWN_N_TILE
    shown = int(view["params"]["n_off"]), int(view["params"]["N_tile"])
    return row if own and shown == (row * width, width) and node.task.params.get("N_tile") == 1 else -1


def _multiplies(node: Node, template: Template, logits: int, rows: int) -> bool:
    """Whether the last step of a task writes the logits as a product of `rows` rows, and nothing is added to it."""
    last = template.steps[-1]
    return bool(
        node.outputs == (logits,)
        and InstructionKind(int(last["op"])) in MATRIX_OPS
        and last["out"] == 0
        and last["epilogue"] == Epilogue.NONE
        and last["rows"] == rows
        and list(template.steps["out"]).count(0) == 1
    )
