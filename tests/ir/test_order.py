from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flywheel.ir.order as module
from flywheel.ir.firing import fire
from flywheel.ir.order import HappensBefore, QueueOrder
from flywheel.ir.records import Wait


@dataclass(frozen=True)
class Node:
    id: int
    waits: tuple[Wait, ...]
    out_counter: int
    sm: int | None = None
    label: str = ""
    rank: int = 0


def _drawn(dice: random.Random) -> list[Node]:
    """Some nodes, each of which awaits counters that all nodes signal before it."""
    count = dice.randrange(2, 30)
    counters = sorted(dice.randrange(12) for _ in range(count))
    nodes = []
    for place, counter in enumerate(counters):
        ready = sorted(set(counters[: counters.index(counter)]))
        chosen = dice.sample(ready, min(len(ready), dice.randrange(3)))
        nodes.append(Node(place, tuple(Wait(each, counters.count(each)) for each in chosen), counter))
    return nodes


@pytest.mark.parametrize("walks", [1, 3, 10**9])
def test_the_order_is_the_closure_of_waits_however_many_answers_are_computed_at_once(
    walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WALKS", walks)
    for seed in range(150):
        dice = random.Random(seed)
        nodes = _drawn(dice)
        ahead: list[set[int]] = []
        for node in nodes:
            awaited = {wait.counter for wait in node.waits}
            direct = [other.id for other in nodes if other.out_counter in awaited]
            ahead.append(set(direct).union(*(ahead[other] for other in direct)))
        places = range(len(nodes))
        if seed % 2:  # the nodes come in any order
            dice.shuffle(nodes)
            places = sorted(places, key=lambda place: nodes[place].id)
        before = HappensBefore(nodes, places)
        classes = {node.id: before.wait_class[place] for place, node in enumerate(nodes)}
        made = {number: {node.id for node in nodes if node.out_counter == number} for number in range(12)}
        used = sorted(number for number, producers in made.items() if producers)
        for node in nodes:
            for signals in ((number,) for number in used):
                known = made[signals[0]] <= ahead[node.id]
                assert before.reached(signals, classes[node.id]) == known, (seed, node.id, signals)
            several = tuple(sorted(dice.sample(used, min(len(used), 3))))
            known = all(made[number] <= ahead[node.id] for number in several)
            assert before.reached(several, classes[node.id]) == known, (seed, node.id, several)


def test_counters_that_are_opaque_hide_what_came_before_them_from_answers_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [Node(0, (), 0), Node(1, (Wait(0, 1),), 1), Node(2, (Wait(1, 1),), 2), Node(3, (Wait(2, 1),), 3)]
    for walks in (1, 10**9):
        monkeypatch.setattr(module, "MAX_WALKS", walks)
        before = HappensBefore(nodes, range(4), opaque={1})
        for _ in range(2):
            answers = [before.reached((0,), before.wait_class[node]) for node in range(4)]
            assert answers == [False, True, False, False]
            assert before.reached((1,), before.wait_class[3])


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    n = draw(st.integers(1, 12))
    counters = sorted(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)))
    last = {counter: place for place, counter in enumerate(counters)}
    nodes = []
    for place in range(n):
        ready = [counter for counter, end in last.items() if end < place]
        chosen = draw(st.lists(st.sampled_from(ready), max_size=2, unique=True)) if ready else []
        waits = tuple(Wait(counter, counters.count(counter)) for counter in chosen)
        nodes.append(Node(place, waits, counters[place], draw(st.sampled_from([None, 0, 1, 2]))))
    return nodes


@given(graphs())
@settings(deadline=None)
def test_the_order_of_queues_is_the_closure_of_waits_and_queues(nodes: list[Node]) -> None:
    before: list[set[int]] = []
    for place, node in enumerate(nodes):
        ahead = [
            other
            for other in range(place)
            if (node.sm is not None and nodes[other].sm == node.sm)
            or nodes[other].out_counter in {wait.counter for wait in node.waits}
        ]
        before.append(set(ahead).union(*(before[other] for other in ahead)))
    order = fire(nodes, serial=True)
    queues = QueueOrder(nodes, order)
    for second in order:
        done = queues.before(second)
        assert {first for first in range(len(nodes)) if done >> first & 1} == before[second]


@given(graphs())
@settings(deadline=None)
def test_the_order_of_queues_may_be_asked_of_some_steps_only(nodes: list[Node]) -> None:
    order = fire(nodes, serial=True)
    all_asked, some_asked = QueueOrder(nodes, order), QueueOrder(nodes, order)
    known = {second: all_asked.before(second) for second in order}
    for second in order[1::2]:
        assert some_asked.before(second) == known[second] == some_asked.before(second)
