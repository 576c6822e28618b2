"""Which SM runs which task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Run

TASK_COST_BYTES: Final = 32 * 1024
"""Fixed cost of a task in streamed bytes: about a microsecond of one SM's share of an H200's bandwidth."""

POLICIES: Final = ("load_balance", "idle_first", "round_robin")


def place(
    runs: Sequence[Run], stages: Sequence[str], num_sms: int, assignment: str | Mapping[int, int]
) -> Sequence[int]:
    """SM of every task. Raises ConfigError for an unknown policy, task or SM.

    The runs of one stage, which `stages` names, run side by side, so they are spread together. An explicit map decides
    for the tasks that it names; load_balance decides for the rest.
    """
    policy = assignment if isinstance(assignment, str) else "load_balance"
    if policy not in POLICIES:
        raise ConfigError(f"sm_assignment={policy!r} is not one of {', '.join(POLICIES)}, or a map of task to SM")
    known: dict[int, list[int]] = {}
    for run in runs:
        if id(run.tiles) not in known:
            known[id(run.tiles)] = [tile.est_bytes + TASK_COST_BYTES for tile in run.tiles]
    numbers = iter(runs)
    sizes = [sum(len(next(numbers).tiles) for _ in same) for _, same in groupby(stages)]
    sms = spread([cost for run in runs for cost in known[id(run.tiles)]], sizes, num_sms, policy)
    return sms if isinstance(assignment, str) else _override(sms, assignment, num_sms)


def spread(costs: Sequence[int], sizes: Sequence[int], num_sms: int, policy: str) -> list[int]:
    """SM of each tile; `sizes` are the tiles of each stage, in which the policies, three, begin anew.

    round_robin: tile i of a stage on SM i modulo their number. load_balance: largest tiles first, each on the SM with
    the least of this stage; ties go to the SM with the least so far. idle_first: ties go to the SM with the least of
    the stage before, which is there when its operands are, and then to the one with the least so far.
    """
    # Here, since nothing but lowering should wait for numba.
    from flywheel.lowering.spreading import deal

    return deal(costs, sizes, num_sms, POLICIES.index(policy))


def _override(sms: Sequence[int], assignment: Mapping[int, int], num_sms: int) -> list[int]:
    for task, sm in assignment.items():
        if not 0 <= task < len(sms) or not 0 <= sm < num_sms:
            raise ConfigError(f"sm_assignment: task {task} on SM {sm} is not in 0..{len(sms) - 1} on 0..{num_sms - 1}")
    return [assignment.get(task, sm) for task, sm in enumerate(sms)]
