"""Groups adjacent tasks that differ only in columns and SM into units. Alike layers share one unit.

A value of a unit is computed once for all layers. This module expands columns over units to columns over the units of
all layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.ir import InstructionKind, MegakernelProgram, Runs, Task, Wait
from flywheel.ir.compressed import Layers, Span, local_layers, stretches_of

Ints = npt.NDArray[np.int64]

_APART: Final = 1 << 40
"""Distance between ids that move from layer to layer and ids that stay."""


class Unit(NamedTuple):
    """The common part of `n_tasks` tasks, each `N_tile` columns after the one before. `params` are the first task's."""

    op: InstructionKind
    inputs: Sequence[int]
    signal: int
    waits: Sequence[Wait]
    params: Mapping[str, Any]
    est_bytes: int
    est_flops: int
    n_tasks: int


@dataclass(frozen=True, slots=True)
class Units:
    """A program's units, with the template's stored once, and the units of all layers in list order: the unit of each,
    and the number of layers by which it is shifted."""

    units: list[Unit]
    layers: Layers | None
    unit_of: Ints
    moved: Ints
    behind: int
    """The first of `units` behind the layers."""

    @property
    def tasks(self) -> Ints:
        """[task] the number of the task's unit among the units of all layers."""
        counts = np.array([unit.n_tasks for unit in self.units], np.int64)
        return np.repeat(np.arange(len(self.unit_of)), counts[self.unit_of])

    def places(self, n_tasks: int) -> Ints:
        """The place of each unit's first task in the program with fewer layers, of `n_tasks` tasks in all."""
        counts = np.array([unit.n_tasks for unit in self.units], np.int64)
        starts = np.cumsum(counts) - counts
        starts[self.behind :] += n_tasks - counts.sum()
        return starts

    def counters(self, numbers: Sequence[int]) -> Ints:
        """A counter of each unit, for all layers."""
        return self._further(np.array(numbers, np.int64)[self.unit_of], self.moved)

    def awaited(self) -> tuple[Ints, Ints, Ints]:
        """(units of all layers, counters, thresholds) of all waits."""
        pairs = [[(wait.counter, wait.threshold) for wait in unit.waits if wait.threshold > 0] for unit in self.units]
        ends = np.cumsum([0, *map(len, pairs)])
        flat = np.array([pair for each in pairs for pair in each], np.int64).reshape(-1, 2)
        starts, counts = ends[self.unit_of], np.diff(ends)[self.unit_of]
        who = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(who)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[who]
        return who, self._further(flat[place, 0], self.moved[who]), flat[place, 1]

    def numbered(
        self, operands: Sequence[tuple[tuple[int, ...], Hashable] | None], known: dict[Hashable, int]
    ) -> Ints:
        """A number for each unit of all layers, equal for equal operands of all calls with the same `known`.

        `operands` has for each unit the buffers and a part that does not move. None, for no operand, becomes -1.
        """
        rows = []
        times = self.layers.times + 2 if self.layers is not None else 1
        for operand in operands:
            if operand is None:
                rows.append((-1, 0))
                continue
            buffers, layer, moves = self._at_first(operand[0])
            rows.append((known.setdefault((buffers, operand[1]), len(known)) * times + layer, moves))
        numbers, moves_too = np.array(rows, np.int64).reshape(-1, 2).T
        return numbers[self.unit_of] + moves_too[self.unit_of] * self.moved

    def _at_first(self, buffers: tuple[int, ...]) -> tuple[tuple[int, ...], int, bool]:
        """Buffers shifted so that the last is in the first layer, the layer that it was in, and whether they shift with
        the layer.

        Buffers after the layers stay.
        """
        if self.layers is None:
            return buffers, 0, False
        span = self.layers.buffers
        last = max(buffers, default=0)
        if last < span.least or last >= span.stop or not span.size:
            return buffers, 0, False
        layer = (last - span.least) // span.size
        back = layer * span.size
        return tuple([number if number < span.least else number - back + _APART for number in buffers]), layer, True

    def _further(self, counters: Ints, by: Ints) -> Ints:
        if self.layers is None:
            return counters
        span = self.layers.counters
        return counters + np.where(counters >= span.least, by * span.size, 0)


def units_of(program: MegakernelProgram) -> Units:
    """The units of a program."""
    tasks, layers = program.tasks, local_layers(program)
    if not isinstance(tasks, Runs):
        units = list(_of_tasks(tasks))
        return Units(units, None, np.arange(len(units)), np.zeros(len(units), np.int64), len(units))
    runs = tasks.spelled if layers is not None else tasks.runs
    parts = [
        [
            Unit(run.op, run.inputs, run.out_counter, run.waits, *stretch)
            for run in part
            for stretch in stretches_of(run.tiles)
        ]
        for part in _cut(runs, layers.runs if layers is not None else Span(0, 0))
    ]
    head, layer, tail = map(len, parts)
    times = layers.times if layers is not None else 1
    return Units(
        [unit for part in parts for unit in part],
        layers,
        np.concatenate(
            [np.arange(head), np.tile(np.arange(head, head + layer), times), np.arange(tail) + head + layer]
        ),
        np.concatenate([np.zeros(head, np.int64), np.repeat(np.arange(times), layer), np.full(tail, times - 1)]),
        head + layer,
    )


def _cut(runs: Sequence[Any], span: Span) -> tuple[Sequence[Any], ...]:
    return runs[: span.start], runs[span.start : span.stop], runs[span.stop :]


def _of_tasks(tasks: Sequence[Task]) -> Iterator[Unit]:
    for _, same in groupby(tasks, key=_shared):
        alike = list(same)
        task = alike[0]
        yield Unit(
            task.op, task.inputs, task.out_counter, task.waits, task.params, task.est_bytes, task.est_flops, len(alike)
        )


def _shared(task: Task) -> tuple[object, ...]:
    params = task.params
    own = params.get("recipe"), params.get("n_heads"), params.get("M_tile")
    return task.op, id(task.inputs), task.out_counter, id(task.waits), task.est_bytes, task.est_flops, own
