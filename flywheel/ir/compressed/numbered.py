"""Runs whose tasks keep ids of their own, and a list of tasks as such runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from flywheel.ir.compressed.runs import Run, Runs, make_run
from flywheel.ir.compressed.tiles import Tile
from flywheel.ir.records import Task, make_task


class NumberedRuns(Runs):
    """The tasks of a part of a program, with the ids that they have in the program.

    An SM of -1 stands for none. Such tasks can be planned and packed, but `validate` refuses a program that has them.
    """

    __slots__ = ("_ids",)

    def __init__(self, runs: Sequence[Run], sms: Sequence[int], ids: Sequence[int]) -> None:
        """Raises ValueError as Runs, and unless each tile has an id."""
        super().__init__(runs, sms)
        self._ids = ids if isinstance(ids, array) else array("q", ids)
        if len(self._ids) != len(self.sms):
            raise ValueError(f"{len(self._ids)} ids for {len(self.sms)} tasks")

    @property
    def ids(self) -> Sequence[int]:
        """The id of each task."""
        return self._ids

    def __eq__(self, other: object) -> bool:
        """Whether the other sequence has equal tasks."""
        return isinstance(other, Runs | tuple) and self._all() == tuple(other)

    __hash__ = None  # params are dicts

    def __reduce__(self) -> tuple[type[Runs], tuple[Any, ...]]:
        return NumberedRuns, (self.spelled, self.sms, self._ids)

    def _all(self) -> tuple[Task, ...]:
        if self._tasks is None:
            by_place = super()._all()
            self._tasks = tuple([
                make_task(
                    number, task.op, task.inputs, task.outputs, task.out_counter, task.waits, task.params,
                    None if task.sm == -1 else task.sm, task.est_bytes, task.est_flops, task.label, task.rank,
                )
                for number, task in zip(self._ids, by_place, strict=True)
            ])  # fmt: skip
        return self._tasks


def as_runs(tasks: Sequence[Task]) -> Runs:
    """The tasks as runs: adjacent ones that differ only in params, costs, id and SM are one run."""
    if isinstance(tasks, Runs):
        return tasks
    sms = array("q", [-1 if task.sm is None else task.sm for task in tasks])
    return NumberedRuns(runs_of(tasks), sms, [task.id for task in tasks])


def runs_of(tasks: Sequence[Task]) -> list[Run]:
    """The runs of tasks: adjacent ones that differ only in params, costs, id and SM are in one run."""
    runs = []
    for (op, inputs, outputs, counter, waits, label, rank), alike in groupby(tasks, _shared):
        tiles = tuple([Tile(task.params, task.est_bytes, task.est_flops) for task in alike])
        runs.append(make_run(op, inputs, outputs, counter, waits, label, tiles, rank))
    return runs


def _shared(task: Task) -> tuple[Any, ...]:
    """What the tasks of a run have in common."""
    inputs, outputs, waits = tuple(task.inputs), tuple(task.outputs), tuple(task.waits)
    return task.op, inputs, outputs, task.out_counter, waits, task.label, task.rank
