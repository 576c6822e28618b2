"""The plan of a program: what the packer packs; the cost model prices the same variant, queues and hand-offs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flywheel.errors import InvalidProgramError
from flywheel.ir import MegakernelProgram, Runs
from flywheel.plan.handoff import HandOffs, by_counters, by_data
from flywheel.plan.nodes import Grouping, group_tasks
from flywheel.plan.variant import KernelVariant, variant_of


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A program, the block that runs it, its tasks by node, and how nodes learn that what they read is there.

    `order` are places in `program.tasks`, SM after SM and in list order on each; those of SM s are
    `order[first[s] : first[s + 1]]`.
    """

    program: MegakernelProgram
    variant: KernelVariant
    grouping: Grouping
    hand_offs: HandOffs
    order: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    @property
    def x_slices(self) -> int:
        """Slices in which an input that fits may be multiplied: a counter says nothing of a part."""
        return self.variant.x_slices if self.hand_offs.awaited else 1

    @property
    def sms(self) -> npt.NDArray[np.int64]:
        """The SM of each entry of `order`."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


def make_plan(program: MegakernelProgram) -> Plan:
    """The plan of a program that `validate(strict=True)` accepts.

    Raises ConfigError as `variant_of` does, and InvalidProgramError that names the first task without an SM.
    """
    grouping = group_tasks(program.tasks)
    variant = variant_of(program)
    decide = by_data if variant.data_hand_offs else by_counters
    return Plan(program, variant, grouping, decide(program, grouping), *queues_of(program))


def queues_of(program: MegakernelProgram) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`order` and `first` of a plan. Raises InvalidProgramError for a program of several GPUs, and that names the first
    task without an SM."""
    if program.ranks > 1:
        raise InvalidProgramError(f"program: {program.ranks} ranks, and a plan is of one GPU")
    num_sms = program.target.num_sms if program.target is not None else 0
    tasks = program.tasks
    placed = tasks.sms if isinstance(tasks, Runs) else [-1 if task.sm is None else task.sm for task in tasks]
    sms = np.array(placed, np.int64)
    if len(sms) and not 0 <= sms.min() <= sms.max() < num_sms:
        task = next(task for task in tasks if task.sm is None or not 0 <= task.sm < num_sms)
        raise InvalidProgramError(f"task {task.id} ({task.label}): sm={task.sm} is not in 0..{num_sms - 1}")
    # Numbers of 16 bits, which a target's SMs have, are sorted by their digits.
    order = np.argsort(sms.astype(np.uint16) if num_sms <= 1 << 16 else sms, kind="stable")
    return order, np.concatenate(([0], np.cumsum(np.bincount(sms, minlength=num_sms))))
