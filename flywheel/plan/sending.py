"""Which matrix products can store their result on the other GPUs directly, so that no separate push task is needed.

Source: docs/vm.md, "Ranks".
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import InvalidProgramError
from flywheel.ir import Buffer, MegakernelProgram, Run, Runs
from flywheel.ir.access import tile, tile_rows
from flywheel.ir.compressed import Tiles
from flywheel.plan.nodes import group_tasks, make_nodes
from flywheel.plan.rules import steps_of
from flywheel.plan.step import Form, x_rows

Ints = npt.NDArray[np.int64]

NO_COLUMNS: Final = 0
"""In place of a tile's number of rows, where its task names no columns."""


class TileReader:
    """Reads the tiles of runs as columns of numbers. It reads tiles that runs share once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Ints]] = {}

    def __call__(self, runs: Sequence[Run], buffers: Sequence[int]) -> Ints:
        """[4, task]: buffer, first column, end column and rows of the tile of each task. Run k's is of `buffers[k]`."""
        sizes = np.array([len(run.tiles) for run in runs], np.int64)
        found = [np.empty((3, 0), np.int64), *[self._columns(run.tiles) for run in runs]]
        return np.vstack([np.repeat(np.array(buffers, np.int64), sizes), np.hstack(found)])

    def _columns(self, tiles: Tiles) -> Ints:
        known = self._known.get(id(tiles))
        if known is None:
            known = self._known[id(tiles)] = tiles, _read(tiles)
        return known[1]


def _read(tiles: Tiles) -> Ints:
    table = []
    for stretch in tiles.stretches:
        columns = tile(stretch.params)
        start, end = columns or (0, 0)
        rows = NO_COLUMNS if columns is None else tile_rows(stretch.params)
        table.append((start, end - start, rows, stretch.n_tiles))
    start, width, rows, sizes = np.array(table, np.int64).T
    each = np.repeat(np.arange(len(sizes)), sizes)
    number = np.arange(len(each)) - (np.cumsum(sizes) - sizes)[each]
    first = start[each] + number * width[each]
    return np.stack([first, first + width[each], rows[each]])


def numbered(table: Ints) -> Ints:
    """A number for each column of a table. Equal columns have equal numbers, 0, 1.. in all."""
    order = np.lexsort(table)
    ordered = table[:, order]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(np.append(False, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)))[: len(order)]
    return numbers


def made_by(tasks: Runs, buffers: Mapping[int, Buffer], sources: Set[int], read: TileReader) -> tuple[Ints, Ints]:
    """(tiles of buffers in `sources` that a product's last step stores, as `read` gives them; the places of the
    products).

    All tasks are of one GPU. A buffer in which tasks write, or may write, a column twice has no such tiles.
    """
    writing = [(run, place) for run, place in zip(tasks.runs, tasks.first, strict=False) if run.outputs]
    beside = {number for run, _ in writing for number in run.outputs[1:]}
    makers = [(run, place) for run, place in writing if run.outputs[0] in sources - beside]
    overlapping = _overlapping(read([run for run, _ in makers], [run.outputs[0] for run, _ in makers]))
    makers = [(run, place) for run, place in makers if run.outputs[0] not in overlapping]
    runs = [run for run, _ in makers]
    stored = _stores(runs, buffers)
    return read(runs, [run.outputs[0] for run in runs])[:, stored], places_of(makers)[stored]


def places_of(runs: Sequence[tuple[Run, int]]) -> Ints:
    """The places of the tasks of runs, of each of which the place of its first task is given."""
    sizes = np.array([len(run.tiles) for run, _ in runs], np.int64)
    starts = np.array([place for _, place in runs], np.int64)
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _overlapping(tiles: Ints) -> set[int]:
    """The buffers whose tiles have unequal numbers of rows, overlap, or are not all of named columns."""
    number, start, end, rows = tiles[:, np.lexsort(tiles[2::-1])]
    wrong = (number[1:] == number[:-1]) & ((start[1:] < end[:-1]) | (rows[1:] != rows[:-1]))
    return {*number[1:][wrong].tolist(), *number[rows == NO_COLUMNS].tolist()}


def _stores(runs: Sequence[Run], buffers: Mapping[int, Buffer]) -> npt.NDArray[np.bool_]:
    """Whether each task of the runs ends with a product that it stores as its first output."""
    touched = dict.fromkeys(number for run in runs for number in (*run.inputs, *run.outputs))
    tasks = Runs(runs, array("q", bytes(8 * sum([len(run.tiles) for run in runs]))))
    program = MegakernelProgram(buffers=tuple([buffers[number] for number in touched]), counters=(), tasks=tasks)
    grouping = group_tasks(program)
    nodes, forms = make_nodes(program, grouping)
    known: dict[tuple[int, int], bool] = {}
    ends = []
    for node in nodes:
        key = node.form, tile_rows(node.task.params)
        if key not in known:
            known[key] = _ends_with_product(forms[node.form], key[1])
        ends.append(known[key])
    return np.array(ends, np.bool_)[grouping.node_of]


def _ends_with_product(form: Form, rows: int) -> bool:
    """Whether the last step is a product of `rows` rows, and the only step that writes the first output."""
    try:
        steps = steps_of(form)
    except InvalidProgramError:
        return False  # it has no kernel; the packer raises an error that names the task
    if not steps or not steps[-1].matrix or x_rows(steps[-1], steps, form) != rows:
        return False
    return steps[-1].out == 0 and [step.out for step in steps].count(0) == 1
