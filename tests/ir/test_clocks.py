from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.ir.clocks import QueueClocks
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
def test_clocks_are_the_closure_of_waits_and_queues(nodes: list[Node]) -> None:
    before: list[set[int]] = []
    for place, node in enumerate(nodes):
        ahead = [
            other
            for other in range(place)
            if (node.sm is not None and nodes[other].sm == node.sm)
            or nodes[other].out_counter in {wait.counter for wait in node.waits}
        ]
        before.append(set(ahead).union(*(before[other] for other in ahead)))
    clocks = QueueClocks(nodes, fire(nodes, serial=True))
    for first in range(len(nodes)):
        for second in range(len(nodes)):
            known = nodes[first].sm is not None and first in before[second]
            assert clocks.before(first, second) == known
