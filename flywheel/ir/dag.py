"""The task DAG that counters define: every producer of a counter precedes every task that waits on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flywheel.ir.firing import ProofTask, walk
from flywheel.ir.program import MegakernelProgram


def producers_by_counter(tasks: Sequence[ProofTask]) -> dict[int, list[int]]:
    """Positions in `tasks` of each counter's producers."""
    producers: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        producers.setdefault(task.out_counter, []).append(index)
    return producers


def dependency_edges(program: MegakernelProgram) -> set[tuple[int, int]]:
    """(producer id, consumer id) pairs. Their number is quadratic in the width of a join, so use it for small
    programs."""
    tasks = program.tasks
    producers = producers_by_counter(tasks)
    return {
        (tasks[producer].id, task.id)
        for task in tasks
        for wait in task.waits
        for producer in producers.get(wait.counter, ())
    }


def list_order_is_topological(tasks: Sequence[ProofTask], produced: dict[int, int]) -> bool:
    """Whether every counter that a task waits on is complete (`produced[counter]` increments) before its position."""
    left = dict(produced)
    checked: dict[int, int] = {}  # ids of shared waits sequences that are complete
    for task in tasks:
        waits = task.waits
        if waits and id(waits) not in checked:
            for wait in waits:
                if left.get(wait.counter, 0):
                    return False
            checked[id(waits)] = 1
        left[task.out_counter] -= 1
    return True


def topological_positions(tasks: Sequence[ProofTask]) -> Sequence[int]:
    """Positions in an order that respects every wait; a `range` where the list is in such an order.

    Tasks on or behind a cycle are left out.
    """
    produced = Counter([task.out_counter for task in tasks])
    if list_order_is_topological(tasks, produced):
        return range(len(tasks))
    shared = {id(task.waits): task.waits for task in tasks}
    needs = {
        identity: [(each, produced[each]) for each in sorted({wait.counter for wait in waits}) if each in produced]
        for identity, waits in shared.items()
    }
    return walk([needs[id(task.waits)] for task in tasks], [task.out_counter for task in tasks])


def topological_order(program: MegakernelProgram) -> list[int] | None:
    """Task ids in an order that respects every wait; None where there is no such order."""
    order = topological_positions(program.tasks)
    if len(order) < len(program.tasks):
        return None
    return [program.tasks[index].id for index in order]


def find_cycle(tasks: Sequence[ProofTask], ordered: Sequence[int]) -> list[int]:
    """Positions of one cycle, in execution order, among the tasks that `topological_positions` left out."""
    placed = set(ordered)
    producers = producers_by_counter(tasks)
    current = next((index for index in range(len(tasks)) if index not in placed), None)
    path: list[int] = []
    seen: dict[int, int] = {}
    while current is not None and current not in seen:
        seen[current] = len(path)
        path.append(current)
        current = next(
            (
                producer
                for wait in tasks[current].waits
                for producer in producers.get(wait.counter, ())
                if producer not in placed
            ),
            None,
        )
    return [] if current is None else path[seen[current] :][::-1]
