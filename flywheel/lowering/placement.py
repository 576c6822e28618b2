"""Which SM runs which task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Final

from flywheel.errors import ConfigError
from flywheel.lowering.stamp import Node

TASK_COST_BYTES: Final = 32 * 1024
"""Fixed cost of a task in streamed bytes: about a microsecond of one SM's share of an H200's bandwidth."""



@dataclass(slots=True)
class Loads:
    """What each SM has been given: in all stages, and in the last one."""

    total: list[int]
    latest: list[int]


Place = Callable[[Sequence[int], Loads], list[int]]


def place(nodes: Sequence[Node], num_sms: int, assignment: str | Mapping[int, int]) -> list[list[int]]:
    """SM of every tile of every node. Raises ConfigError for an unknown policy, task or SM.

    The sets of one stage run side by side, so they are spread together. An explicit map decides for the tasks that it
    names; load_balance decides for the rest.
    """
    policy = assignment if isinstance(assignment, str) else "load_balance"
    if policy not in POLICIES:
        raise ConfigError(f"sm_assignment={policy!r} is not one of {', '.join(POLICIES)}, or a map of task to SM")
    spread, loads = POLICIES[policy], Loads([0] * num_sms, [0] * num_sms)
    placed: list[list[int]] = []
    start = 0
    while start < len(nodes):
        end = start + 1
        while end < len(nodes) and nodes[end].stage == nodes[start].stage:
            end += 1
        stage = nodes[start:end]
        sms = spread([tile.est_bytes + TASK_COST_BYTES for node in stage for tile in node.tiles], loads)
        taken = 0
        for node in stage:
            placed.append(sms[taken : taken + len(node.tiles)])
            taken += len(node.tiles)
        start = end
    if not isinstance(assignment, str):
        _override(placed, assignment, num_sms)
    return placed


def round_robin(costs: Sequence[int], loads: Loads) -> list[int]:
    """Tile i of a stage on SM i modulo their number."""
    return [index % len(loads.total) for index in range(len(costs))]


def load_balance(costs: Sequence[int], loads: Loads) -> list[int]:
    """Largest tiles first, each on the SM with the least of this stage; ties go to the SM with the least so far."""
    return _spread(costs, loads, sorted(range(len(loads.total)), key=loads.total.__getitem__))


def idle_first(costs: Sequence[int], loads: Loads) -> list[int]:
    """As load_balance, but ties go to the SM with the least of the stage before: it is there when its operands are."""
    keys = list(zip(loads.latest, loads.total, strict=True))
    return _spread(costs, loads, sorted(range(len(keys)), key=keys.__getitem__))


def _spread(costs: Sequence[int], loads: Loads, ranked: Sequence[int]) -> list[int]:
    """SMs of the tiles, ties to the one that `ranked` has first; `loads` is brought up to date."""
    if len(set(costs)) == 1:
        sms = [ranked[index % len(ranked)] for index in range(len(costs))]
    else:
        sms = [0] * len(costs)
        heap = [(0, rank) for rank in range(len(ranked))]
        heapify(heap)
        for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            load, rank = heap[0]
            heapreplace(heap, (load + costs[index], rank))
            sms[index] = ranked[rank]
    loads.latest = [0] * len(ranked)
    for index, sm in enumerate(sms):
        loads.total[sm] += costs[index]
        loads.latest[sm] += costs[index]
    return sms


def _override(placed: list[list[int]], assignment: Mapping[int, int], num_sms: int) -> None:
    total = sum(map(len, placed))
    for task, sm in assignment.items():
        if not 0 <= task < total or not 0 <= sm < num_sms:
            raise ConfigError(f"sm_assignment: task {task} on SM {sm} is not in 0..{total - 1} on 0..{num_sms - 1}")
    task = 0
    for sms in placed:
        for index in range(len(sms)):
            sms[index] = assignment.get(task, sms[index])
            task += 1


POLICIES: Final[Mapping[str, Place]] = {
    "load_balance": load_balance,
    "idle_first": idle_first,
    "round_robin": round_robin,
}
