"""Tasks that differ in tile params and SM alone, as one node: what is decided node by node is decided once for all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import INHERITED_PARAMS, PARAM_FIELDS, InstructionKind, MegakernelProgram, Task
from flywheel.plan.step import Form, Operand

_OWN_PARAMS: Final = PARAM_FIELDS.keys() - INHERITED_PARAMS


@dataclass(frozen=True, slots=True)
class Node:
    """Some tasks, of which `task` is the first, the rows of their operands and the number of their form."""

    task: Task
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    form: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """Nodes, distinct params, and which of them each task has."""

    firsts: list[Task]
    node_of: npt.NDArray[np.int64]
    params: list[Mapping[str, Any]]
    params_of: npt.NDArray[np.int64]
    kinds: list[int]
    """Of the params of each node: equal where the steps are."""


def group_tasks(tasks: Sequence[Task]) -> Grouping:
    """Group tasks by the identity of their operands, waits and recipe, which tiles and equal layers share."""
    nodes: dict[tuple[int, ...], int] = {}
    firsts: list[Task] = []
    node_kinds: list[int] = []
    numbers: dict[int, tuple[int, int]] = {}
    kinds: dict[Hashable, int] = {}
    params: list[Mapping[str, Any]] = []
    node_of, params_of = [], []
    for task in tasks:
        identity = id(task.params)
        known = numbers.get(identity)
        if known is None:
            known = numbers[identity] = len(params), kinds.setdefault(_kind(task.params), len(kinds))
            params.append(task.params)
        number, kind = known
        key = (kind, task.op, task.out_counter, id(task.inputs), id(task.outputs), id(task.waits))
        node = nodes.get(key)
        if node is None:
            node = nodes[key] = len(firsts)
            firsts.append(task)
            node_kinds.append(kind)
        node_of.append(node)
        params_of.append(number)
    return Grouping(firsts, np.array(node_of, np.int64), params, np.array(params_of, np.int64), node_kinds)


def _kind(params: Mapping[str, Any]) -> Hashable:
    """What of a task's params decides on its steps: the recipe, what no tile changes, and which others there are."""
    names = params.keys()
    own = tuple(sorted((name, params[name]) for name in _OWN_PARAMS & names))
    return id(params.get("recipe")), own, frozenset(INHERITED_PARAMS & names), params.get("kv_rows")


def make_nodes(program: MegakernelProgram, grouping: Grouping) -> tuple[list[Node], list[Form]]:
    """The nodes of a program whose buffers are all there, and the forms that they have, in order of first use."""
    rows = {buffer.id: row for row, buffer in enumerate(program.buffers)}
    looks: dict[Operand, int] = {}
    look_of = [
        looks.setdefault(Operand(buffer.dtype, tuple(buffer.shape), buffer.kind), len(looks))
        for buffer in program.buffers
    ]
    operands = list(looks)
    known: dict[Hashable, int] = {}
    forms: list[Form] = []
    nodes = []
    for task, kind, widest in zip(grouping.firsts, grouping.kinds, widest_tiles(grouping), strict=True):
        inputs = tuple([rows[number] for number in task.inputs])
        outputs = tuple([rows[number] for number in task.outputs])
        written = tuple([outputs.index(row) if row in outputs else None for row in inputs])
        shape = tuple([look_of[row] for row in inputs]), tuple([look_of[row] for row in outputs])
        key = (task.op, kind, shape, written, widest)
        number = known.get(key)
        if number is None:
            number = known[key] = len(forms)
            ins, outs = ([operands[look] for look in each] for each in shape)
            forms.append(_form(task, ins, outs, written, widest))
        nodes.append(Node(task, inputs, outputs, number))
    return nodes, forms


def widest_tiles(grouping: Grouping) -> list[int]:
    """Columns of the widest tile of each node, 0 where its tasks name none."""
    widths = np.array([each.get("N_tile", 0) for each in grouping.params], np.int64)
    widest = np.zeros(len(grouping.firsts), np.int64)
    np.maximum.at(widest, grouping.node_of, widths[grouping.params_of])
    return [int(width) for width in widest]


def _form(
    task: Task,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    written: tuple[int | None, ...],
    widest: int,
) -> Form:
    params = task.params
    return Form(
        op=task.op,
        recipe=params["recipe"] if task.op is InstructionKind.FUSED else None,
        own={name: params[name] for name in sorted(_OWN_PARAMS & params.keys())},
        given=frozenset(INHERITED_PARAMS & params.keys()),
        kv_rows=params.get("kv_rows"),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        written=written,
        widest=widest,
    )
