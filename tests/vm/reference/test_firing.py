from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import InvalidProgramError, UnknownNameError
from flywheel.ir import InstructionKind, MegakernelProgram, Task, Wait
from flywheel.vm.reference.firing import firing_order


def task(number: int, counter: int, waits: tuple[Wait, ...] = (), sm: int | None = None) -> Task:
    return Task(number, InstructionKind.NOP, (), (), counter, waits, sm=sm, label=f"t{number}")


def respects_waits(tasks: list[Task], order: list[int]) -> bool:
    counts: dict[int, int] = {}
    for index in order:
        if any(counts.get(wait.counter, 0) < wait.threshold for wait in tasks[index].waits):
            return False
        counts[tasks[index].out_counter] = counts.get(tasks[index].out_counter, 0) + 1
    return True


@st.composite
def joins(draw: st.DrawFn) -> list[Task]:
    """Tasks that wait for whole counters of lower number, shuffled."""
    producers: dict[int, int] = {}
    tasks = []
    for number in range(draw(st.integers(1, 12))):
        counter = draw(st.integers(max(producers, default=0), max(producers, default=0) + 1))
        awaited = draw(st.sets(st.integers(0, counter - 1))) if counter else set()
        waits = tuple(Wait(other, producers[other]) for other in sorted(awaited) if other in producers)
        producers[counter] = producers.get(counter, 0) + 1
        tasks.append(task(number, counter, waits, draw(st.none() | st.integers(0, 2))))
    return draw(st.permutations(tasks))


@given(tasks=joins(), order=st.sampled_from(["list", "adversarial"]), seed=st.integers(0, 20))
def test_every_order_fires_each_task_once_and_only_when_it_may(tasks: list[Task], order: str, seed: int) -> None:
    fired = firing_order(tasks, order, seed)
    assert sorted(fired) == list(range(len(tasks)))
    assert respects_waits(tasks, fired)


@given(tasks=joins(), seed=st.integers(0, 20))
def test_queues_keep_the_list_order_of_each_sm(tasks: list[Task], seed: int) -> None:
    tasks = sorted(tasks, key=lambda each: each.id)
    fired = firing_order(tasks, "queues", seed)
    assert respects_waits(tasks, fired)
    for sm in range(3):
        queue = [index for index, each in enumerate(tasks) if each.sm == sm]
        assert [index for index in fired if tasks[index].sm == sm] == queue


def test_list_order_fires_the_first_that_may() -> None:
    tasks = [task(0, 0, (Wait(1, 1),)), task(1, 1), task(2, 2)]
    assert firing_order(tasks, "list") == [1, 0, 2]


def test_adversarial_orders_differ_by_seed_and_repeat() -> None:
    tasks = [task(number, number) for number in range(30)]
    orders = [firing_order(tasks, "adversarial", seed) for seed in range(6)]
    assert len({tuple(order) for order in orders}) == 6
    assert orders[0] == list(reversed(range(30)))
    assert orders == [firing_order(tasks, "adversarial", seed) for seed in range(6)]


def test_odd_seeds_hold_one_task_back_behind_all_others() -> None:
    tasks = [task(number, number) for number in range(30)]
    assert len({firing_order(tasks, "adversarial", seed)[-1] for seed in range(1, 40, 2)}) > 5


def test_a_wait_for_part_of_a_counter_is_met_by_that_many() -> None:
    tasks = [task(0, 1, (Wait(0, 2),)), task(1, 0), task(2, 0), task(3, 0)]
    assert firing_order(tasks, "list") == [1, 2, 0, 3]


def test_tasks_that_never_fire_are_named_with_what_they_wait_for() -> None:
    tasks = [task(0, 0), task(1, 1, (Wait(0, 2),)), task(2, 2, (Wait(1, 1),))]
    with pytest.raises(
        InvalidProgramError,
        match=r"2 of 3 tasks never fire: task 1 \(t1\) waits for counter 0 >= 2, which stands at 1; task 2 \(t2\)",
    ):
        firing_order(tasks, "list")


def test_queues_that_block_each_other_are_stuck_though_the_dag_is_not() -> None:
    tasks = [task(0, 0, (Wait(1, 1),), sm=0), task(1, 1, sm=0)]
    assert firing_order(tasks, "list") == [1, 0]
    with pytest.raises(InvalidProgramError, match=r"task 0 \(t0\) waits for counter 1 >= 1, which stands at 0"):
        firing_order(tasks, "queues")


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="order 'random' is not one of list, adversarial, queues"):
        firing_order([], "random")


def test_a_lowered_program_without_a_producer_is_stuck(lowered: Callable[..., MegakernelProgram]) -> None:
    program = lowered()
    broken = replace(program, tasks=program.tasks[1:])
    with pytest.raises(InvalidProgramError, match="tasks never fire"):
        firing_order(broken.tasks, "queues", 3)
