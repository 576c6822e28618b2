"""Choose the SM of every task."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Run
from flywheel.ir.compressed import NO_LAYERS, Layers

TASK_COST_BYTES: Final = 32 * 1024
"""Fixed cost of a task, as streamed bytes: about a microsecond at one SM's share of an H200's bandwidth."""

POLICIES: Final = ("load_balance", "idle_first", "round_robin")


def place(
    runs: Sequence[Run],
    stages: Sequence[str],
    num_sms: int,
    assignment: str | Mapping[int, int],
    layers: Layers = NO_LAYERS,
) -> array[int]:
    """The SM of every task. Raises ConfigError for an unknown policy, task or SM.

    `stages` names the stage of each run. Runs of one stage run side by side, so they are spread together. With
    `layers`, `runs` have the template once. An explicit map decides for the tasks that it names, and load_balance for
    the rest.
    """
    policy = policy_of(assignment)
    part = layers.runs.start, layers.runs.stop, layers.times
    sms = dealt(runs, stages, num_sms, policy, part)
    return sms if isinstance(assignment, str) else overridden(sms, assignment, num_sms)


def policy_of(assignment: str | Mapping[int, int]) -> str:
    """The policy for tasks that no map names. Raises ConfigError for an unknown policy."""
    policy = assignment if isinstance(assignment, str) else "load_balance"
    if policy not in POLICIES:
        raise ConfigError(f"sm_assignment={policy!r} is not one of {', '.join(POLICIES)}, or a map of task to SM")
    return policy


def dealt(
    runs: Sequence[Run], stages: Sequence[str], num_sms: int, policy: str, template: tuple[int, int, int]
) -> array[int]:
    """The SM of every task by a policy. `template` is (first run, end, how often those runs come)."""
    start, stop, times = template
    parts = [_stages(runs[part], stages[part]) for part in (slice(start), slice(start, stop), slice(stop, None))]
    head, layer, tail = (array("q", [number for stage in part for cost in stage for number in cost]) for part in parts)
    sizes = [array("q", [sum([count for _, count in stage]) for stage in part]) for part in parts]
    return spread(head + layer * times + tail, sizes[0] + sizes[1] * times + sizes[2], num_sms, policy)


_Costs = list[tuple[int, int]]
"""Pairs (cost, number of tiles with that cost)."""


def _stages(runs: Sequence[Run], stages: Sequence[str]) -> list[_Costs]:
    """The costs of each stage's tiles."""
    found = []
    for _, same in groupby(zip(stages, runs, strict=True), key=lambda pair: pair[0]):
        tiles = [stretch for _, run in same for stretch in run.tiles.stretches]
        found.append([(each.est_bytes + TASK_COST_BYTES, each.n_tiles) for each in tiles])
    return found


def spread(costs: Sequence[int], sizes: Sequence[int], num_sms: int, policy: str) -> array[int]:
    """The SM of each tile. `costs` has pairs: a cost, then the number of tiles with it. `sizes` has the number of tiles
    of each stage.

    Each policy begins anew in each stage. round_robin puts tile i on SM i modulo the number of SMs. load_balance takes
    the largest tiles first and puts each on the SM with the least work of this stage; ties go to the SM with the least
    work so far. idle_first breaks ties first by the least work in the previous stage, since such an SM is free when its
    operands are ready.
    """
    if policy == "round_robin":
        turns = array("q", [place % num_sms for place in range(max(sizes, default=0))])
        placed = array("q")
        for size in sizes:
            placed.extend(turns[:size])
        return placed
    # Imported here, so that only the other policies wait for numba.
    from flywheel.lowering.spreading import deal

    return deal(costs, sizes, num_sms, policy == "idle_first")


def overridden(sms: array[int], assignment: Mapping[int, int], num_sms: int) -> array[int]:
    """`sms`, changed for the tasks that the map names. Raises ConfigError for an unknown task or SM."""
    for task, sm in assignment.items():
        if not 0 <= task < len(sms) or not 0 <= sm < num_sms:
            raise ConfigError(f"sm_assignment: task {task} on SM {sm} is not in 0..{len(sms) - 1} on 0..{num_sms - 1}")
        sms[task] = sm
    return sms
