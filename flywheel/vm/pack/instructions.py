"""The instruction table. Most of its columns are filled per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import PARAM_FIELDS, Wait
from flywheel.plan.formats import ScalePlacement
from flywheel.plan.nodes import Node
from flywheel.plan.ranks import RankPart
from flywheel.plan.step import ABSENT, MatrixCoding
from flywheel.plan.stream import expand
from flywheel.vm.abi import PEERS_SHIFT, InstructionFlag, Layout, numpy_struct
from flywheel.vm.pack.template import Template

INSTRUCTION: Final = numpy_struct("amk_instruction_t")


def picked(table: npt.NDArray[np.void], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """These rows of a table. Numpy itself would copy them member by member."""
    return table.view(f"V{table.itemsize}")[rows].view(table.dtype)


def node_rows(
    nodes: Sequence[Node],
    first_steps: Sequence[int],
    templates: Sequence[Template],
    counters: Mapping[int, int],
    waits: Sequence[Sequence[Wait]],
) -> npt.NDArray[np.void]:
    """One instruction for each node, with these waits but without params, SM and place. `counters` maps awaited
    counters to their rows."""
    table = np.zeros(len(nodes), INSTRUCTION)
    forms = [node.form for node in nodes]
    table["op"] = [node.task.op for node in nodes]
    table["out_counter"] = [counters.get(node.task.out_counter, ABSENT) for node in nodes]
    table["first_step"] = np.array(first_steps, np.int32)[forms]
    table["n_steps"] = np.array([len(template.steps) for template in templates], np.int32)[forms]
    table["flags"] = np.array([template.flags for template in templates], np.uint32)[forms]
    _fill(table, "inputs", "n_inputs", [node.inputs for node in nodes])
    _fill(table, "outputs", "n_outputs", [node.outputs for node in nodes])
    _fill(table, "wait_counter", "n_waits", [[counters[wait.counter] for wait in each] for each in waits])
    _fill(table, "wait_threshold", "n_waits", [[wait.threshold for wait in each] for each in waits])
    return table


def _fill(table: npt.NDArray[np.void], name: str, count: str, lists: Sequence[Sequence[int]]) -> None:
    """Write lists of different lengths to the array member `name`, and their lengths to `count`."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    table[count] = lengths
    table[name][expand(lengths)] = list(chain.from_iterable(lists))


def params_rows(params: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.void]:
    """One `amk_params_t` for each params record. Absent params are zero; `group` is `window` where there is one."""
    table = np.zeros(len(params), numpy_struct("amk_params_t"))
    for name in PARAM_FIELDS:
        table[name] = [each.get(name, 0) for each in params]
    for row, each in enumerate(params):
        if "window" in each:
            table["group"][row] = each["window"]
    return table


def peer_flags(part: RankPart) -> npt.NDArray[np.uint32]:
    """For each task of a part, in order: flags for the ranks that its result goes to, and how it is sent."""
    kind = np.where(part.pushes, InstructionFlag.PUSHES, InstructionFlag.SENDS).astype(np.uint32)
    return np.where(part.peers != 0, part.peers << np.uint32(PEERS_SHIFT) | kind, np.uint32(0))


def other_ranks(part: RankPart) -> np.uint32:
    """Flags for sending a task's result to all other ranks."""
    return np.uint32(((1 << part.ranks) - 1 - (1 << part.rank)) << PEERS_SHIFT)


def weight_layouts(weights: Set[int], coded: Mapping[int, MatrixCoding]) -> dict[int, Layout]:
    """Row of a buffer with a product's weights -> its layout. `weights` are the rows of matrices, `coded` of those that
    are quantised."""
    rows = {row: Layout.UNITS if row in coded else Layout.FRAGMENTS for row in weights}
    for each in coded.values():
        rows[each.scales] = Layout.ROW_SCALES if each.coding.placement is ScalePlacement.ROWS else Layout.IN_UNITS
        if each.zeros != ABSENT:
            rows[each.zeros] = Layout.IN_UNITS
    return rows
