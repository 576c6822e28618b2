"""Runs whose tasks keep ids of their own."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from two_ranks import changed, two_ranks

from flywheel.ir import MegakernelProgram, Runs, Task, validate
from flywheel.ir.compressed import NO_LAYERS, as_runs

TASKS = changed(two_ranks(), 2, sm=None).tasks


def runs(tasks: Sequence[Task] = TASKS) -> Runs:
    return as_runs(MegakernelProgram(tasks=tasks))


def test_runs_of_tasks_are_the_tasks() -> None:
    found = runs()
    assert tuple(found) == TASKS
    assert [task.id for task in found] == list(found.ids) != list(range(len(TASKS)))
    assert found == TASKS
    assert runs(found) is found


def test_adjacent_tasks_that_share_all_but_their_tiles_are_one_run() -> None:
    tiles = [replace(TASKS[0], id=number, sm=number, params={"n_off": number}, est_bytes=number) for number in (7, 5)]
    other = replace(TASKS[0], id=9, label="another")
    found = runs([*tiles, other, *tiles])
    assert [len(run.tiles) for run in found.runs] == [2, 1, 2]
    assert list(found) == [*tiles, other, *tiles]


def test_no_tasks_are_no_runs() -> None:
    assert list(runs(())) == []


def test_they_differ_from_runs_that_are_numbered_by_place() -> None:
    found = runs()
    assert found != Runs(found.runs, found.sms)
    assert list(Runs(found.runs, found.sms).ids) == list(range(len(TASKS)))


def test_a_copy_in_another_process_keeps_the_ids() -> None:
    found = runs()
    assert pickle.loads(pickle.dumps(found)) == found


def test_each_task_has_an_id() -> None:
    found = runs()
    with pytest.raises(ValueError, match="1 ids for 14 tasks"):
        Runs(found.runs, found.sms, ids=[1])


@pytest.mark.parametrize("sm", [None, 0, 1 << 20])
def test_a_program_with_such_tasks_gets_the_verdict_of_its_tasks(sm: int | None) -> None:
    program = changed(two_ranks(), 2, sm=sm)
    assert validate(replace(program, tasks=as_runs(program))) == validate(program)


def test_a_copy_of_runs_without_layers_has_none() -> None:
    found = Runs(runs().runs, [0] * len(TASKS))
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found
    assert copy.layers is NO_LAYERS


def test_a_list_of_operands_is_read_as_a_tuple() -> None:
    task: Task = replace(TASKS[0], inputs=list(TASKS[0].inputs), outputs=list(TASKS[0].outputs), waits=[])
    assert runs([task]).runs[0].inputs == tuple(TASKS[0].inputs)
