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
from flywheel.plan.handoff import HandOffs
from flywheel.plan.nodes import Grouping, Node
from flywheel.plan.ranks import RankPart
from flywheel.plan.routine import Routine
from flywheel.plan.routines import Routines
from flywheel.plan.staging import FRAGMENT_ROWS
from flywheel.plan.step import adds_columns, x_rows

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def sums_of(grouping: Grouping, made: Routines, buffers: Sequence[Buffer], part: RankPart) -> Bools:
    """By place in the list of tasks: whether the task only adds its columns of all ranks' shards."""
    nodes, routines = made.nodes, made.by_form
    is_sum = [_is_sum(node, routines[node.form], buffers, part.ranks) for node in nodes]
    return np.array(is_sum, np.bool_)[grouping.node_of]


def adding_products(
    grouping: Grouping, made: Routines, hand_offs: HandOffs, part: RankPart, products: Ints, sums: Ints
) -> Bools:
    """Which of the tasks `products` add what the tasks `sums` would add, each right behind it on its SM. That sum need
    not run.

    Both are places in the list of tasks. The sums are some of `sums_of`; the tasks before them are products, or not. A
    product leaves its sum alone if the operands of both are more than ABI_MAX_INPUTS.
    """
    nodes, routines = made.nodes, made.by_form
    others = (1 << part.ranks) - 1 - (1 << part.rank)
    asked, numbers = np.unique(grouping.node_of[np.concatenate([products, sums])], return_inverse=True)
    facts = [_facts(number, part.rank, nodes, routines, hand_offs) for number in asked.tolist()]
    rows, n_inputs, result, awaits, announced, stored, summand = np.array(facts, np.int64).reshape(-1, 7).T
    product, total = numbers[: len(products)], numbers[len(products) :]
    tile = np.array([each.get("N_tile", 0) for each in grouping.params], np.int64)
    start, width = grouping.n_off[products], tile[grouping.params_of[products]]
    found: Bools = (
        (part.peers[products] & others == others)
        & ~part.pushes[products]
        & (rows[product] > 0)
        & (stored[product] == summand[total])
        & (start == grouping.n_off[sums])
        & (width == tile[grouping.params_of[sums]])
        & (result[total] == width * rows[product])
        & (awaits[total] == 0)
        & (announced[product] == 0)
        & (n_inputs[product] + part.ranks + 1 <= ABI_MAX_INPUTS)
        & (-(-(start % FRAGMENT_ROWS + width) // FRAGMENT_ROWS) <= made.pass_blocks)
    )
    return found


def _facts(
    number: int, rank: int, nodes: Sequence[Node], routines: Sequence[Routine], hand_offs: HandOffs
) -> tuple[int, ...]:
    """(rows of the product that the task ends with, if it is of the task's own columns, else 0; its inputs; elements of
    the first step's result; remaining waits; whether a task polls its counter; its output; its input of the rank)."""
    node, steps = nodes[number], routines[nodes[number].form].steps
    last = steps[-1] if steps else None
    own = last is not None and last.matrix and not {"n_off", "N_tile"} & last.params.keys()
    return (
        x_rows(last, steps, routines[node.form].form) if own and last is not None else 0,
        len(node.inputs),
        steps[0].result.numel if steps else 0,
        len(hand_offs.waits[number]),
        node.task.out_counter in hand_offs.counters,
        node.outputs[0] if node.outputs else -1,
        node.inputs[rank] if len(node.inputs) > rank else -1,
    )


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
