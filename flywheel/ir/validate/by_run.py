"""The proof of a program of runs, run by run. What holds for one task of a run holds for all, except for their columns.

Tiles of a run share their operands, their waits and their counter. So they have the same order with every other task,
and no order with each other. Source: docs/ir.md, "Proof by runs".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from flywheel.ir.access import TILED_OPS, WHOLE, Region, tile
from flywheel.ir.compressed import Run, Runs, Stretch, Tiles, as_runs, ends_of, task_of
from flywheel.ir.dtype import PER_SM_SPACES, BufferKind
from flywheel.ir.exchange import is_push
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.lanes import check_lanes, check_sequences
from flywheel.ir.validate.memory import check_pages
from flywheel.ir.validate.races import Accesses, check_races
from flywheel.ir.validate.ranks import check_exchanges, check_places
from flywheel.ir.validate.tasks import check_tasks


def levels_of_safe_runs(program: MegakernelProgram) -> int | None:
    """The number of levels of the program's order, if the rules after `check_structure` find neither error nor warning.

    None where they might find one; then a check of every task says which. None for tasks that are no runs, too: their
    proof relies on no runs, and tests compare with it. The program has passed `check_structure`.
    """
    if not isinstance(program.tasks, Runs):
        return None
    accesses = accesses_of_safe_runs(program)
    return None if accesses is None else accesses.done.depth


def accesses_of_safe_runs(program: MegakernelProgram) -> Accesses | None:
    """The accesses of the first task of each run, which stands for all its tasks; None where `levels_of_safe_runs` is
    None."""
    runs = as_runs(program)
    num_sms = program.target.num_sms if program.target is not None else None
    used = runs.used_sms
    if used and (min(used) < 0 or (num_sms is not None and max(used) >= num_sms)):
        return None
    if not PER_SM_SPACES.isdisjoint([buffer.space for buffer in program.buffers]):
        return None
    if program.pages is not None and any(page.space in PER_SM_SPACES for page in program.pages.pages):
        return None
    buffers = {buffer.id: buffer for buffer in program.buffers}
    findings = Findings(strict=True)
    apart = _distinct_tasks(runs, buffers)
    columns = _Columns()
    if apart is None or not all(columns.are_apart(run, buffers) for run in runs.runs):
        return None
    if not _waits_are_joins(runs, {counter.id for counter in program.counters}):
        return None
    check_tasks(replace(program, tasks=apart), findings)
    if not findings.errors:
        check_sequences(program, findings)
        check_lanes(program, findings)
    if findings.errors or findings.warnings:
        return None
    firsts = tuple(
        [task_of(run, run.tiles.stretches[0], first, 0) for run, first in zip(runs.runs, runs.first, strict=False)]
    )
    check_places(replace(program, tasks=firsts), findings)
    if findings.errors:
        return None
    accesses = _RunAccesses(replace(program, tasks=firsts), runs.runs, columns)
    check_races(accesses.program, accesses, findings)
    check_pages(accesses.program, accesses, findings)
    if not findings.errors:
        check_exchanges(accesses.program, accesses, findings)
    return None if findings.errors or findings.warnings else accesses


def _distinct_tasks(runs: Runs, buffers: Mapping[int, Buffer]) -> tuple[Task, ...] | None:
    """Tasks at the ends of the stretches of one run for each op, tiles and looks of operands. None where an operand
    names no buffer.

    `check_tasks` finds the same for two tasks that differ only in the ids of their operands. If it accepts the first
    and the last tile of a stretch, it accepts the tiles between.
    """
    numbers: dict[tuple[object, ...], int] = {}
    looks = {
        number: numbers.setdefault((buffer.kind, buffer.dtype, *buffer.shape), len(numbers))
        for number, buffer in buffers.items()
    }
    distinct: dict[tuple[object, ...], tuple[Run, int]] = {}
    for run, first in zip(runs.runs, runs.first, strict=False):
        operands = (*run.inputs, *run.outputs)
        shapes = tuple([looks.get(number, -1) for number in operands])
        if -1 in shapes:
            return None
        # A look includes which operands are the same buffer.
        same = tuple([operands.index(number) for number in operands])
        key = run.op, id(run.tiles), len(run.inputs), same, shapes, len(run.waits)
        distinct.setdefault(key, (run, first))
    return tuple(
        task_of(run, tile, first + place, runs.sms[first + place])
        for run, first in distinct.values()
        for place, tile in ends_of(run)
    )


class _Columns:
    """The columns that the tiles of runs write, by the tiles' identity, since equal layers share tiles."""

    def __init__(self) -> None:
        self._known: dict[int, list[Region] | None] = {}

    def of(self, run: Run) -> list[Region]:
        """The sorted columns of `outputs[0]` that a run writes, adjacent ranges merged. The run's tiles must be
        apart."""
        found = self._read(run.tiles) if run.op in TILED_OPS else None
        return [WHOLE] if found is None else found

    def are_apart(self, run: Run, buffers: Mapping[int, Buffer]) -> bool:
        """Whether no two tiles of the run write the same element, and no tile reads what another one writes."""
        if len(run.tiles) == 1:
            return True
        if run.op not in TILED_OPS or len(run.outputs) != 1 or run.outputs[0] in run.inputs:
            return False
        return buffers[run.outputs[0]].kind is not BufferKind.KV_CACHE and self._read(run.tiles) is not None

    def _read(self, tiles: Tiles) -> list[Region] | None:
        """The columns of the tiles. None where a tile names no columns, where two overlap, or where tiles differ in K,
        in rows or in the rows that they attend to."""
        if id(tiles) not in self._known:
            self._known[id(tiles)] = _merged(tiles)
        return self._known[id(tiles)]


def _merged(tiles: Tiles) -> list[Region] | None:
    stretches = tiles.stretches
    found = sorted([region for each in stretches if (region := _columns_of(each)) is not None])
    if len(found) < len(stretches) or any(one[1] > other[0] for one, other in pairwise(found)):
        return None
    if len(tiles) > 1 and any({"kv_rows", "lane"} & each.params.keys() for each in stretches):
        return None
    if len({(each.params.get("K"), each.params.get("M_tile")) for each in stretches}) > 1:
        return None
    merged: list[Region] = []
    for start, end in found:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, end))
    return merged


def _columns_of(stretch: Stretch) -> Region | None:
    """The columns of all tiles of a stretch, which are adjacent."""
    first = tile(stretch.params)
    if first is None or (stretch.n_tiles > 1 and first[1] <= first[0]):
        return None
    return first[0], first[0] + stretch.n_tiles * (first[1] - first[0])


def _waits_are_joins(runs: Runs, counters: set[int]) -> bool:
    """Whether every wait needs all signals of an existing counter, and all of its producers come earlier in the
    list."""
    signals = Counter[int]()
    for run in runs.runs:
        signals[run.out_counter] += len(run.tiles)
    if not signals.keys() <= counters:
        return False
    left = dict(signals)
    for run in runs.runs:
        for wait in run.waits:
            if wait.counter not in signals or wait.threshold != signals[wait.counter] or left[wait.counter]:
                return False
        left[run.out_counter] -= len(run.tiles)
    return True


class _RunAccesses(Accesses):
    """The accesses of the first tasks of `runs`, where each writes the columns of all its run's tiles. `program` has
    these tasks."""

    __slots__ = ("_columns", "_single", "program")

    def __init__(self, program: MegakernelProgram, runs: Sequence[Run], columns: _Columns) -> None:
        self.program = program
        self._columns = [columns.of(run) for run in runs]
        self._single = [len(run.tiles) == 1 for run in runs]
        super().__init__(program, range(len(program.tasks)))

    def _collect_writes(self) -> None:
        for index, task in enumerate(self.tasks):
            regions = self._columns[index]
            for number in task.outputs:
                entries = [(start, end, index) for start, end in regions]
                if number in self.multi_row or self.buffers[number].kind is BufferKind.KV_CACHE:
                    entries = [self._widened(number, entry) for entry in entries]
                self.writes.setdefault(number, []).extend(entries)
                regions = [WHOLE]

    def read(self, index: int, operand: int) -> list[Region] | None:
        """The columns that the task reads. For a run of several tiles that may differ in this, and are no pushes, all
        columns."""
        apart = self._single[index] or (self._several and is_push(self.tasks[index]))
        return super().read(index, operand) if apart else None

    def pushed(self, index: int) -> list[Region] | None:
        """The columns that all pushes of a run read, which are those that they write."""
        return self._columns[index] if super().pushed(index) is not None else None

    def tiles(self, index: int) -> list[Region]:
        """The columns that the params of all tiles of a run name."""
        return super().tiles(index) if self._single[index] else self._columns[index]
