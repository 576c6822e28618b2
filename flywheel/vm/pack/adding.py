"""Lets a product that sends its columns add all ranks' shards of them, in place of the sum that comes next on its SM.

That saves a task between the arrival of the last shard and the stored sum. The order of work stays the same: nothing
runs between the product and the sum. A product leaves its sum alone in two cases. If it takes several passes, each
would wait for the other ranks before the next one is sent. If somebody waits for its counter, the signal would come
after the sum, and the other ranks may need it before. Source: docs/vm.md, "Ranks".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flywheel.ir import ABI_MAX_INPUTS, Buffer, InstructionKind
from flywheel.plan.nodes import Node
from flywheel.plan.ranks import RankPart
from flywheel.plan.routine import Routine
from flywheel.plan.staging import FRAGMENT_ROWS
from flywheel.plan.step import ABSENT, adds_columns
from flywheel.vm.abi import InstructionFlag, StepFlag
from flywheel.vm.pack.instructions import other_ranks, picked

Table = npt.NDArray[np.void]


def take_sums(
    instructions: Table,
    steps: Table,
    nodes: Sequence[Node],
    routines: Sequence[Routine],
    node_of: npt.NDArray[np.int64],
    buffers: Sequence[Buffer],
    part: RankPart,
    pass_blocks: int,
) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
    """Flag the products that add (ADDS). Returns (the instructions that are left without the sums that they add, `sums`
    of the PackedProgram that has these instructions).

    `instructions` are in the order of SMs, and `node_of` has the node of each. A product leaves its sum alone if the
    operands of both are more than ABI_MAX_INPUTS.
    """
    everything = np.arange(len(instructions))
    is_sum = np.array([_is_sum(node, routines[node.form], buffers, part.ranks) for node in nodes], np.bool_)[node_of]
    if not is_sum.any():
        return everything, {}
    sends = np.uint32(InstructionFlag.SENDS) | other_ranks(part)
    sending, sms = instructions["flags"] & sends == sends, instructions["sm"]
    adding = np.flatnonzero(sending[:-1] & is_sum[1:] & (sms[:-1] == sms[1:]))
    product, total = picked(instructions, adding), picked(instructions, adding + 1)
    last = picked(steps, product["first_step"] + product["n_steps"] - 1)
    added = picked(steps, total["first_step"])
    multiplied, width = last["as"]["product"], product["params"]["N_tile"]
    blocks = -(-(product["params"]["n_off"] % FRAGMENT_ROWS + width) // FRAGMENT_ROWS)
    taken = (
        (last["flags"] & np.uint32(StepFlag.OWN_N_OFF | StepFlag.OWN_N_TILE) == 0)
        & (product["outputs"][:, 0] == total["inputs"][:, part.rank])
        & (product["params"]["n_off"] == total["params"]["n_off"])
        & (width == total["params"]["N_tile"])
        & (added["out_numel"] == width * multiplied["rows"])
        & (total["n_waits"] == 0)
        & (product["out_counter"] == ABSENT)
        & (product["n_inputs"] + part.ranks + 1 <= ABI_MAX_INPUTS)
        & (blocks <= pass_blocks)
    )
    places, ends = adding[taken], product["n_inputs"][taken]
    operands = np.column_stack([total["inputs"][taken, : part.ranks], total["outputs"][taken, 0]])
    instructions["inputs"][places[:, None], ends[:, None] + np.arange(part.ranks + 1)] = operands
    instructions["n_inputs"][places] += part.ranks + 1
    instructions["flags"][places] |= np.uint32(InstructionFlag.ADDS)
    instructions["out_counter"][places] = total["out_counter"][taken]
    kept = np.delete(everything, places + 1)
    rows = np.searchsorted(kept, places).tolist()
    return kept, dict(zip(rows, total["task"][taken].tolist(), strict=True))


def _is_sum(node: Node, routine: Routine, buffers: Sequence[Buffer], ranks: int) -> bool:
    """Whether a task only adds its columns of one input of each rank, in their order, and rounds as its output does."""
    if len(routine.steps) != 1 or routine.steps[0].op is not InstructionKind.ALLREDUCE_SHARD:
        return False
    step = routine.steps[0]
    return (
        adds_columns(step, routine.form)
        and step.args == tuple(range(ranks))
        and step.out == 0
        and step.result.dtype is buffers[node.outputs[0]].dtype
    )
