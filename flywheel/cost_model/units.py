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

from flywheel.ir import InstructionKind, MegakernelProgram, Run, Stretch, Wait
from flywheel.ir.compressed import NO_LAYERS, Brief, Span, brief_of

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
    brief: Brief
    unit_of: Ints
    moved: Ints
    template: Span
    """The template's part of `units`; empty where there are no layers."""

    @property
    def tasks(self) -> Ints:
        """[task] the number of the task's unit among the units of all layers."""
        counts = np.array([unit.n_tasks for unit in self.units], np.int64)
        return np.repeat(np.arange(len(self.unit_of)), counts[self.unit_of])

    def places(self, n_tasks: int) -> Ints:
        """The place of each unit's first task in the program with fewer layers, of `n_tasks` tasks in all."""
        counts = np.array([unit.n_tasks for unit in self.units], np.int64)
        starts = np.cumsum(counts) - counts
        starts[self.template.stop :] += n_tasks - counts.sum()
        return starts

    def stand_ins(self, tasks: Ints, number: Ints, n_tasks: int) -> tuple[Ints, Ints]:
        """(the places of the tasks that stand for these in the program with one or two layers, of `n_tasks` tasks in
        all; the numbers of their layers). `number` is the number of each task's unit among the units of all layers.

        The last layer stands for itself, and the first one for all others. Tasks before and behind the layers have the
        numbers -1 and `brief.layers.times`.
        """
        if self.brief.layers is NO_LAYERS:
            return tasks, np.zeros(len(tasks), np.int64)
        counts = np.array([unit.n_tasks for unit in self.units], np.int64)
        sizes = counts[self.unit_of]
        unit, layer = self.unit_of[number], self.moved[number]
        before, behind = unit < self.template.start, unit >= self.template.stop
        last = ~before & ~behind & (layer == self.brief.layers.times - 1)
        inside = tasks - (np.cumsum(sizes) - sizes)[number]
        places = self.places(n_tasks)[unit] + inside + np.where(last, n_tasks - counts.sum(), 0)
        return places, layer - before + behind

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
        layers = self.brief.layers
        least, stop, size, times = layers.buffers.least, layers.buffers.stop, layers.buffers.size, layers.times + 2
        for operand in operands:
            if operand is None:
                rows.append((-1, 0))
                continue
            buffers, rest = operand
            layer, moves, last = 0, 0, max(buffers, default=0)
            if size and least <= last < stop:  # shifted so that the last is in the first layer
                layer, moves = (last - least) // size, 1
                further = _APART - layer * size
                buffers = tuple([number if number < least else number + further for number in buffers])
            rows.append((known.setdefault((buffers, rest), len(known)) * times + layer, moves))
        numbers, moving = np.array(rows, np.int64).reshape(-1, 2).T
        return numbers[self.unit_of] + moving[self.unit_of] * self.moved

    def _further(self, counters: Ints, by: Ints) -> Ints:
        span = self.brief.layers.counters
        return counters + np.where(counters >= span.least, by * span.size, 0)


def units_of(program: MegakernelProgram) -> Units:
    """The units of a program."""
    brief = brief_of(program, local=True)
    parts = [[unit for run in part for unit in _of_run(run)] for part in brief.parts]
    head, layer, tail = map(len, parts)
    times = brief.layers.times
    return Units(
        [unit for part in parts for unit in part],
        brief,
        np.concatenate(
            [np.arange(head), np.tile(np.arange(head, head + layer), times), np.arange(tail) + head + layer]
        ),
        np.concatenate([np.zeros(head, np.int64), np.repeat(np.arange(times), layer), np.full(tail, times - 1)]),
        Span(head, head + layer),
    )


def _of_run(run: Run) -> Iterator[Unit]:
    """The units of a run: adjacent stretches of equal work are one."""
    for _, same in groupby(run.tiles.stretches, key=_work):
        first, *others = same
        count = first.n_tiles + sum([each.n_tiles for each in others])
        yield Unit(run.op, run.inputs, run.out_counter, run.waits, *first[:3], count)


def _work(stretch: Stretch) -> tuple[object, ...]:
    params = stretch.params
    return stretch.est_bytes, stretch.est_flops, params.get("recipe"), params.get("n_heads"), params.get("M_tile")
