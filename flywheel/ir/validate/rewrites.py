"""Reads of buffers whose columns are written more than once. Each read must see one value, whatever the order of tasks.

Each write of columns that a task reads comes before or after that task, and each column that it reads has a write
before it. So a chain of `write, read, write, read` is no race. A write that is unordered with a reader is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flywheel.ir.access import Region, regions_united, uncovered
from flywheel.ir.order import HappensBefore
from flywheel.ir.records import Task

Write = tuple[int, int, int]
"""(start, end) of the columns written, and the position of the writer."""


@dataclass(slots=True)
class Stage:
    """Writers with the same counter and the same waits: all of them have the same order with any other task."""

    counter: int
    group: int
    writers: list[Write]
    columns: list[Region]
    """The columns that they write, sorted and disjoint."""


@dataclass(frozen=True, slots=True)
class ReadFault:
    """Why a read is a race: its columns, and a writer that is unordered with it or comes only after it.

    `writer` is None where no other task writes the columns.
    """

    columns: Region
    writer: int | None
    ordered: bool = False


def stages_of(tasks: Sequence[Task], wait_class: Sequence[int], writes: Sequence[Write]) -> list[Stage]:
    """The writers of one buffer, by counter and waits."""
    stages: dict[tuple[int, int], Stage] = {}
    for write in writes:
        counter, group = tasks[write[2]].out_counter, wait_class[write[2]]
        stages.setdefault((counter, group), Stage(counter, group, [], [])).writers.append(write)
    for stage in stages.values():
        stage.columns = regions_united([(start, end) for start, end, _ in stage.writers])
    return list(stages.values())


def read_fault(
    reader: int, tasks: Sequence[Task], order: HappensBefore, stages: Sequence[Stage], region: Region, width: int
) -> ReadFault | None:
    """The fault of a read of columns `region` of a buffer of `width` columns; None where it is no race."""
    own = tasks[reader].out_counter, order.wait_class[reader]
    start, end = region[0], min(region[1], width)
    written: list[Region] = []
    later: list[Stage] = []
    for stage in stages:
        if not _meets(stage.columns, start, end):
            continue
        if (stage.counter, stage.group) == own:
            other = _writer_of(stage, [(start, end)], reader)
            if other is not None:
                return ReadFault(region, other)
        elif order.reached((stage.counter,), own[1]):
            written += stage.columns
        elif order.reached((own[0],), stage.group):
            later.append(stage)
        else:
            return ReadFault(region, _writer_of(stage, [(start, end)], reader))
    gaps = uncovered(regions_united(written), start, end)
    if not gaps:
        return None
    missed = next((index for stage in later if (index := _writer_of(stage, gaps, reader)) is not None), None)
    return ReadFault(gaps[0], missed, ordered=True)


def _writer_of(stage: Stage, columns: Sequence[Region], reader: int) -> int | None:
    """A writer of some of the columns, other than the reader."""
    return next((index for *piece, index in stage.writers if index != reader and _meets(columns, *piece)), None)


def _meets(columns: Sequence[Region], start: int, end: int) -> bool:
    return any(first < end and start < last for first, last in columns)
