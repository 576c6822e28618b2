from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.ir.clocks import QueueOrder
from flywheel.ir.firing import fire
from flywheel.ir.records import Wait


@dataclass(frozen=True)
class Node:
    id: int
    waits: tuple[Wait, ...]
    out_counter: int
    sm: int | None
    label: str = ""
    rank: int = 0


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
