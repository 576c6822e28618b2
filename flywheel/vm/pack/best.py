"""The largest logit, kept by the tasks that make the logits, so that SAMPLE_ARGMAX need not read them again.

Each of those tasks adds the best of its columns to a word of the launch, by one atomic maximum a warp; the one that
samples comes after all of them, as the program's order says, and finds the index there. Source: docs/vm.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flywheel.ir import DType, InstructionKind, MegakernelProgram
from flywheel.ir.access import MATRIX_OPS
from flywheel.vm.abi import Epilogue, InstructionFlag
from flywheel.vm.pack.nodes import Grouping, Node
from flywheel.vm.pack.template import Template


def best_flags(
    program: MegakernelProgram, grouping: Grouping, nodes: Sequence[Node], templates: Sequence[Template]
) -> Mapping[int, InstructionFlag]:
    """Nodes that keep the best of a launch, and the one that takes it; none where it is not as the module says.

    It is where one task of the program samples, from one F32 row whose every column is written once, as it comes out
    of a matrix step.
    """
    sizes = np.bincount(grouping.node_of, minlength=len(nodes))
    sampling = [index for index, node in enumerate(nodes) if node.task.op is InstructionKind.SAMPLE_ARGMAX]
    if len(sampling) != 1 or sizes[sampling[0]] != 1:
        return {}
    taker = nodes[sampling[0]]
    logits = taker.inputs[0]
    buffer = program.buffers[logits]
    if buffer.dtype is not DType.F32 or program.buffers[taker.outputs[0]].numel != 1:
        return {}
    writers = [index for index, node in enumerate(nodes) if logits in node.outputs]
    if not writers or not all(_multiplies(nodes[index], templates[nodes[index].form], logits) for index in writers):
        return {}
    widths = np.array([params.get("N_tile", 0) for params in grouping.params], np.int64)[grouping.params_of]
    if widths[np.isin(grouping.node_of, writers)].sum() != buffer.numel:
        return {}
    return dict.fromkeys(writers, InstructionFlag.KEEPS_BEST) | {sampling[0]: InstructionFlag.TAKES_BEST}


def _multiplies(node: Node, template: Template, logits: int) -> bool:
    """Whether the last step of a task writes the logits as a product of one row, and nothing else is added to it."""
    last = template.steps[-1]
    return bool(
        node.outputs == (logits,)
        and InstructionKind(int(last["op"])) in MATRIX_OPS
        and last["out"] == 0
        and last["epilogue"] == Epilogue.NONE
        and last["rows"] == 1
        and list(template.steps["out"]).count(0) == 1
    )
