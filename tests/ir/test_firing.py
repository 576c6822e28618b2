from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from flywheel.ir import InstructionKind, Task, Wait
from flywheel.ir.firing import fire, stuck_in_queues, walk

WAITS = st.lists(st.builds(Wait, st.integers(0, 5), st.integers(-1, 3)), max_size=2)
TASKS = st.lists(st.tuples(st.integers(0, 4), WAITS, st.none() | st.integers(0, 2)), max_size=12)


def tasks_of(drawn: list[tuple[int, list[Wait], int | None]]) -> list[Task]:
    """Tasks that signal, wait and queue as drawn."""
    return [
        Task(number, InstructionKind.NOP, (), (), counter, tuple(waits), sm=sm)
        for number, (counter, waits, sm) in enumerate(drawn)
    ]


def test_of_those_that_may_fire_the_least_key_is_next() -> None:
    needs = [[], [], [(0, 1)], [(0, 2)]]
    assert walk(needs, [0, 0, 1, 1]) == [0, 1, 2, 3]
    assert walk(needs, [0, 0, 1, 1], keys=[1.0, 3.0, 2.0, 0.0]) == [0, 2, 1, 3]
    assert walk(needs, [0, 0, 1, 1], followers={2: 0}) == [1, 2, 0, 3]


def test_what_waits_for_too_much_is_missing() -> None:
    assert walk([[], [(0, 2)], [(1, 1)]], [0, 1, 2]) == [0]


@given(drawn=TASKS, seed=st.integers(0, 9), serial=st.booleans())
def test_what_fires_does_not_depend_on_the_order(
    drawn: list[tuple[int, list[Wait], int | None]], seed: int, serial: bool
) -> None:
    tasks = tasks_of(drawn)
    keys = [random.Random(seed * 100 + index).random() for index in range(len(tasks))]
    assert sorted(fire(tasks, keys, serial)) == sorted(fire(tasks, serial=serial))


@given(drawn=TASKS)
def test_stuck_is_the_first_of_each_queue_that_never_fires(drawn: list[tuple[int, list[Wait], int | None]]) -> None:
    tasks = tasks_of(drawn)
    left = [task for index, task in enumerate(tasks) if index not in fire(tasks, serial=True)]
    heads = {-1 - task.id if task.sm is None else task.sm: task.id for task in reversed(left)}
    assert stuck_in_queues(tasks) == sorted(heads.values())
