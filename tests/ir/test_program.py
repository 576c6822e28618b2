from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from weakref import ref

import pytest

from flywheel.ir import (
    Counter,
    InstructionKind,
    MegakernelProgram,
    Task,
    Wait,
    dependency_edges,
    simulate_adversarial,
    simulate_counters,
    topological_order,
)
from flywheel.ir.program import once
from flywheel.ir.validate import weight_bytes
from flywheel.measure.floor import weight_bytes_read
from flywheel.plan import program_id, variant_of
from flywheel.plan.program import brief_plan

Change = Callable[..., MegakernelProgram]


def test_every_producer_precedes_every_waiter(tiny: MegakernelProgram) -> None:
    edges = dependency_edges(tiny)
    assert {(102, 107), (103, 107), (105, 107), (106, 107)} <= edges
    assert (100, 108) not in edges
    assert len(edges) == 1 + 3 + 2 + 4 + 2 + 4 + 2


def test_a_topological_order_respects_every_edge_in_any_list_order(tiny: MegakernelProgram) -> None:
    assert topological_order(tiny) == [task.id for task in tiny.tasks]
    backwards = replace(tiny, tasks=list(reversed(tiny.tasks)))
    order = topological_order(backwards)
    assert order is not None
    assert sorted(order) == [task.id for task in tiny.tasks]
    assert all(order.index(first) < order.index(second) for first, second in dependency_edges(tiny))


def test_a_cycle_has_no_order_and_nothing_in_it_fires(tiny: MegakernelProgram, with_task: Change) -> None:
    ring = with_task(tiny, 101, waits=(Wait(50, 1), Wait(53, 1)))
    assert topological_order(ring) is None
    order, stuck = simulate_counters(ring)
    assert order == [100]
    assert stuck == [task.id for task in tiny.tasks[1:]]


def test_counters_fire_every_task_once(tiny: MegakernelProgram) -> None:
    order, stuck = simulate_counters(tiny)
    assert stuck == []
    assert sorted(order) == [task.id for task in tiny.tasks]


def test_a_wait_that_cannot_be_met_leaves_its_task_stuck() -> None:
    tasks = [Task(7, InstructionKind.NOP, (), (), 0), Task(8, InstructionKind.NOP, (), (), 1, (Wait(0, 2),))]
    program = MegakernelProgram(tasks=tasks, counters=[Counter(0), Counter(1)])
    assert simulate_counters(program) == ([7], [8])


def test_weight_bytes_count_weights_alone(tiny: MegakernelProgram) -> None:
    assert weight_bytes(tiny) == 2 * (64 * 32 + 32 + 32 * 32 + 16 * 32 + 32 * 32 + 64 * 32)


def test_an_adversary_finds_nothing_in_a_valid_program(tiny: MegakernelProgram) -> None:
    assert simulate_adversarial(tiny, seeds=64) == []


def test_an_adversary_finds_planted_races(tiny: MegakernelProgram, with_task: Change) -> None:
    for number, waits in ((107, (Wait(52, 2), Wait(54, 1))), (101, ()), (112, ()), (108, ()), (109, (Wait(50, 1),))):
        (first, *_) = simulate_adversarial(with_task(tiny, number, waits=waits))
        assert first.startswith(f"task {number} ")


def test_an_adversary_finds_a_read_of_nothing(tiny: MegakernelProgram, with_task: Change) -> None:
    assert simulate_adversarial(with_task(tiny, 112, inputs=(26,))) == [
        "task 112 (sample): reads buffer 26, which nothing else writes"
    ]


def test_an_adversary_is_reproducible(tiny: MegakernelProgram, with_task: Change) -> None:
    racy = with_task(tiny, 107, waits=())
    assert simulate_adversarial(racy) == simulate_adversarial(racy)


def test_an_answer_is_given_again_for_the_same_object_alone() -> None:
    asked: list[int] = []

    @once
    def ranks(program: MegakernelProgram) -> int:
        asked.append(id(program))
        return program.ranks

    one, equal, other = MegakernelProgram(ranks=1), MegakernelProgram(ranks=1), MegakernelProgram(ranks=2)
    assert [ranks(program) for program in (one, one, equal, other, other, one)] == [1, 1, 1, 2, 2, 1]
    assert asked == [id(program) for program in (one, equal, other, one)]


def test_no_answer_keeps_its_program_alive(tiny: MegakernelProgram) -> None:
    program = replace(tiny)
    alive = ref(program)
    variant_of(program)
    weight_bytes_read(program)
    program_id(program)
    brief_plan(program)
    del program
    assert alive() is None


def test_an_answer_goes_with_its_program() -> None:
    @once
    def answer(program: MegakernelProgram) -> MegakernelProgram:
        return MegakernelProgram(ranks=program.ranks + 1)

    program = MegakernelProgram()
    alive = ref(answer(program))
    assert alive() is not None
    del program
    assert alive() is None


def test_what_is_raised_is_raised_again() -> None:
    @once
    def refuse(program: MegakernelProgram) -> int:
        raise ValueError(program.ranks)

    program = MegakernelProgram(ranks=3)
    for _ in range(2):
        with pytest.raises(ValueError, match="3"):
            refuse(program)
