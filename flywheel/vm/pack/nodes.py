"""Tasks that differ in tile params and SM alone, as one node: most columns of the tables are filled node by node."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import InvalidProgramError
from flywheel.ir import (
    INHERITED_PARAMS,
    PARAM_FIELDS,
    Buffer,
    DType,
    InstructionKind,
    MegakernelProgram,
    Task,
    Wait,
)
from flywheel.plan import KernelVariant
from flywheel.vm.abi import ABSENT, numpy_struct
from flywheel.vm.pack.frequencies import Frequencies
from flywheel.vm.pack.step import Form, Operand
from flywheel.vm.pack.template import Template, make_template

INSTRUCTION: Final = numpy_struct("amk_instruction_t")

_OWN_PARAMS: Final = PARAM_FIELDS.keys() - INHERITED_PARAMS


@dataclass(frozen=True, slots=True)
class Node:
    """Some tasks, of which `task` is the first, the rows of their operands and the number of their template."""

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


def make_nodes(
    program: MegakernelProgram, grouping: Grouping, dtype: DType, variant: KernelVariant
) -> tuple[list[Node], list[Template], npt.NDArray[np.float32]]:
    """(nodes, templates, float table). Raises InvalidProgramError naming the first task that has no kernel."""
    rows = {buffer.id: row for row, buffer in enumerate(program.buffers)}
    looks: dict[Operand, int] = {}
    look_of = [
        looks.setdefault(Operand(buffer.dtype, tuple(buffer.shape), buffer.kind), len(looks))
        for buffer in program.buffers
    ]
    operands = list(looks)
    frequencies = Frequencies()
    known: dict[Hashable, int] = {}
    templates: list[Template] = []
    nodes = []
    for task, kind, widest in zip(grouping.firsts, grouping.kinds, widest_tiles(grouping), strict=True):
        inputs = tuple([rows[number] for number in task.inputs])
        outputs = tuple([rows[number] for number in task.outputs])
        written = tuple([outputs.index(row) if row in outputs else None for row in inputs])
        shape = tuple([look_of[row] for row in inputs]), tuple([look_of[row] for row in outputs])
        key = (task.op, kind, shape, written, widest)
        number = known.get(key)
        if number is None:
            number = known[key] = len(templates)
            ins, outs = ([operands[look] for look in each] for each in shape)
            form = _form(task, ins, outs, written, widest)
            try:
                templates.append(make_template(form, dtype, variant, frequencies))
            except InvalidProgramError as error:
                raise InvalidProgramError(f"task {task.id} ({task.label}): {task.op.name} {error}") from error
        nodes.append(Node(task, inputs, outputs, number))
    return nodes, templates, frequencies.table()


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


def node_rows(
    nodes: Sequence[Node],
    first_steps: Sequence[int],
    templates: Sequence[Template],
    counters: Mapping[int, int],
    waits: Sequence[Sequence[Wait]],
) -> npt.NDArray[np.void]:
    """An instruction a node with these waits, but for params, SM and place. `counters` are the rows of those asked."""
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
    table[count] = [len(each) for each in lists]
    width = table[name].shape[1]
    table[name] = [(*each, *(0,) * (width - len(each))) for each in lists]


def params_rows(params: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.void]:
    """`amk_params_t` of each; what is absent is zero."""
    table = np.zeros(len(params), numpy_struct("amk_params_t"))
    for name in PARAM_FIELDS:
        table[name] = [each.get(name, 0) for each in params]
    return table


def weight_rows(nodes: Sequence[Node], templates: Sequence[Template], buffers: Sequence[Buffer]) -> dict[int, None]:
    """Rows of the buffers that hold weight fragments, in order of use.

    Raises InvalidProgramError naming a task that reads one of them as rows.
    """
    rows: dict[int, None] = {}
    for node in nodes:
        template = templates[node.form]
        for place in template.matrices:
            rows[node.inputs[template.steps["args"][place, 1]]] = None
    for node in nodes:
        for number in templates[node.form].loose:
            row = node.inputs[number]
            if row in rows:
                buffer = buffers[row]
                raise InvalidProgramError(
                    f"task {node.task.id} ({node.task.label}): {node.task.op.name} reads buffer {buffer.id} "
                    f"({buffer.name}), a matrix elsewhere, as another operand"
                )
    return rows
