"""Groups tasks that differ only in tile params and SM into nodes. A decision for a node holds for all its tasks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import (
    INHERITED_PARAMS,
    PARAM_FIELDS,
    BufferKind,
    DType,
    InstructionKind,
    KvRows,
    MegakernelProgram,
    Run,
    Task,
)
from flywheel.ir.compressed import Runs, Stretch, as_runs, task_of
from flywheel.ir.records import maker
from flywheel.plan.step import Form, StepOperand

Ints = npt.NDArray[np.int64]

_OWN_PARAMS: Final = PARAM_FIELDS.keys() - INHERITED_PARAMS


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its first `task`, the rows of its operands, and the number of its form."""

    task: Task
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    form: int


make_node: Final = maker(Node)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The nodes, their stretches, and each task's node and params. The arrays are in the order of tasks.

    `params` are a task's params without `n_off`, which has its own column; `n_off` is 0 if the task has none.
    """

    firsts: list[Task]
    stretches: list[list[Stretch]]
    node_of: Ints
    params: list[Mapping[str, Any]]
    params_of: Ints
    n_off: Ints
    kinds: list[int]
    """Numbers of the nodes' kinds of params. Equal kinds have the same steps."""


def group_tasks(program: MegakernelProgram) -> Grouping:
    """Group tasks by the identity of their operands, waits and recipe, which tiles and equal layers share."""
    kinds = _Kinds()
    return _group(as_runs(program), kinds)


class _Kinds:
    """Numbers the distinct params, and their kinds: the fields that determine the steps."""

    def __init__(self) -> None:
        self.params: list[Mapping[str, Any]] = []
        self._known: dict[int, tuple[int, int]] = {}
        self._kinds: dict[Hashable, int] = {}

    def __call__(self, params: Mapping[str, Any]) -> tuple[int, int]:
        """(number, kind)."""
        known = self._known.get(id(params))
        if known is None:
            kind = self._kinds.setdefault(_kind(params), len(self._kinds))
            known = self._known[id(params)] = len(self.params), kind
            self.params.append(params)
        return known


_StretchFacts = tuple[int, int, int, int, int]
"""A stretch: number of its params, its node's number in the run, first tile's column, columns of a tile, number of
tiles."""


@dataclass(frozen=True, slots=True)
class _RunTiles:
    """A run's tiles, which equal layers share: the stretches, and each node's first place, stretches and kind."""

    facts: list[_StretchFacts]
    nodes: list[tuple[int, list[Stretch], int]]


def _group(tasks: Runs, kinds: _Kinds) -> Grouping:
    known: dict[int, _RunTiles] = {}
    nodes: dict[tuple[int, ...], int] = {}
    firsts: list[Task] = []
    stretches: list[list[Stretch]] = []
    node_kinds: list[int] = []
    facts: list[_StretchFacts] = []
    numbers: list[int] = []  # of the runs' nodes
    bases: list[int] = []  # for each stretch, the place in `numbers` of its run's first node
    ids = tasks.ids
    for run, first in tasks.placed:
        tiles = known.get(id(run.tiles))
        if tiles is None:
            tiles = known[id(run.tiles)] = _read_tiles(run, kinds)
        facts += tiles.facts
        bases += [len(numbers)] * len(tiles.facts)
        shared = run.op, run.out_counter, id(run.inputs), id(run.outputs), id(run.waits)
        for place, own, kind in tiles.nodes:
            node = nodes.setdefault((kind, *shared), len(firsts))
            if node == len(firsts):
                firsts.append(task_of(run, own[0], ids[first + place], tasks.sms[first + place]))
                stretches.append([])
                node_kinds.append(kind)
            stretches[node] += own
            numbers.append(node)
    table: Ints = np.array(facts, np.int64).reshape(-1, 5)
    params, local, starts, widths, sizes = table.T
    each = np.repeat(np.arange(len(sizes)), sizes)
    number = np.arange(len(each)) - (np.cumsum(sizes) - sizes)[each]
    node_of = np.array(numbers, np.int64)[local + np.array(bases, np.int64)][each]
    n_off: Ints = starts[each] + number * widths[each]
    return Grouping(firsts, stretches, node_of, kinds.params, params[each], n_off, node_kinds)


def _read_tiles(run: Run, kinds: _Kinds) -> _RunTiles:
    nodes: dict[int, int] = {}
    found: list[tuple[int, list[Stretch], int]] = []
    facts = []
    place = 0
    for stretch in run.tiles.stretches:
        params, n_tiles = stretch.params, stretch.n_tiles
        number, kind = kinds(params)
        node = nodes.setdefault(kind, len(nodes))
        if node == len(found):
            found.append((place, [], kind))
        found[node][1].append(stretch)
        width = params["N_tile"] if n_tiles > 1 else 0
        facts.append((number, node, params.get("n_off", 0), width, n_tiles))
        place += n_tiles
    return _RunTiles(facts, found)


def _kind(params: Mapping[str, Any]) -> Hashable:
    """The params that determine a task's steps: the recipe, the values that no tile changes, and the names of the
    others."""
    own, given = _names(tuple(params))
    values = tuple([(name, params[name]) for name in own])
    return params.get("recipe"), values, given, params.get("kv_rows"), _misses(params)


def _misses(params: Mapping[str, Any]) -> bool:
    """Whether a task that appends a row may attend to none. A window of NEW rows has the row that is appended, and so
    has one from row 0 on."""
    recipe, always = params.get("recipe"), params.get("kv_start", 0) == 0 < params.get("kv_len", 1)
    if recipe is None or always or params.get("kv_rows") == KvRows.NEW:
        return False
    return any(step.op is InstructionKind.KV_APPEND for step in recipe.steps)


@lru_cache(maxsize=1 << 10)
def _names(names: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Of the names of params, (those with values that no tile changes, sorted; those that tiles may change)."""
    return tuple(sorted(_OWN_PARAMS & set(names))), frozenset(INHERITED_PARAMS & set(names))


def make_nodes(program: MegakernelProgram, grouping: Grouping) -> tuple[list[Node], list[Form]]:
    """The nodes of a program whose buffers all exist, and their forms, in order of first use."""
    rows = {buffer.id: row for row, buffer in enumerate(program.buffers)}
    looks: dict[tuple[int, int, tuple[int, ...]], int] = {}  # an enum as an int hashes fast
    look_of = [
        looks.setdefault((int(buffer.dtype), int(buffer.kind), tuple(buffer.shape)), len(looks))
        for buffer in program.buffers
    ]
    operands = [StepOperand(DType(dtype), shape, BufferKind(kind)) for dtype, kind, shape in looks]
    known: dict[Hashable, int] = {}
    forms: list[Form] = []
    nodes = []
    for task, kind, stretches in zip(grouping.firsts, grouping.kinds, grouping.stretches, strict=True):
        widest = max([each.params.get("N_tile", 0) for each in stretches])
        inputs = tuple([rows[number] for number in task.inputs])
        outputs = tuple([rows[number] for number in task.outputs])
        written = tuple([outputs.index(row) if row in outputs else None for row in inputs])
        shape = tuple([look_of[row] for row in inputs]), tuple([look_of[row] for row in outputs])
        key = (int(task.op), kind, shape, written, widest)
        number = known.get(key)
        if number is None:
            number = known[key] = len(forms)
            ins, outs = ([operands[look] for look in each] for each in shape)
            forms.append(_form(task, ins, outs, written, widest))
        nodes.append(make_node(task, inputs, outputs, number))
    return nodes, forms


def _form(
    task: Task,
    inputs: Sequence[StepOperand],
    outputs: Sequence[StepOperand],
    written: tuple[int | None, ...],
    widest: int,
) -> Form:
    params = task.params
    own, given = _names(tuple(params))
    return Form(
        op=task.op,
        recipe=params["recipe"] if task.op is InstructionKind.FUSED else None,
        own={name: params[name] for name in own},
        given=given,
        kv_rows=params.get("kv_rows"),
        misses=_misses(params),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        written=written,
        widest=widest,
    )
