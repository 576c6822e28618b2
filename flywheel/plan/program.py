"""The plan of a program. The packer packs it, and the cost model predicts from the same variant, queues and
hand-offs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import InvalidProgramError
from flywheel.ir import MegakernelProgram, Runs
from flywheel.ir.program import once
from flywheel.ir.repeating import local_layers, repeated
from flywheel.plan.handoff import HandOffs, by_counters, by_data, sampled_of, shares_pages
from flywheel.plan.nodes import Grouping, group_tasks
from flywheel.plan.ranks import RankPart, parts_of
from flywheel.plan.variant import KernelVariant, variant_of

BRIEF: Final = 2
"""Times that a template comes in a program that shows all hand-offs. A task that polls a counter is in the counter's
layer or the next one, so the first layer stands for all but the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A program, the layout of its blocks, its tasks by node, and its hand-offs.

    `order` holds places in `program.tasks`, SM by SM, and in list order on each SM. The places of SM s are
    `order[first[s] : first[s + 1]]`.
    """

    program: MegakernelProgram
    variant: KernelVariant
    grouping: Grouping
    hand_offs: HandOffs
    order: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    part: RankPart | None = None
    """The part of one GPU of several; None where one GPU runs the program alone."""

    @property
    def x_slices(self) -> int:
        """The number of slices in which a fitting input may be multiplied. It is 1 if hand-offs use counters, since a
        counter does not announce parts of an input."""
        return self.variant.x_slices if self.hand_offs.awaited else 1

    @property
    def sms(self) -> npt.NDArray[np.int64]:
        """The SM of each entry of `order`."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


def make_plan(program: MegakernelProgram) -> Plan:
    """The plan of a program of one GPU that `validate(strict=True)` accepts.

    Raises ConfigError as `variant_of`, and InvalidProgramError that names the first task without an SM.
    """
    return _planned(program, variant_of(program))


@once
def brief_plan(program: MegakernelProgram) -> Plan:
    """The plan of a program of one GPU, as `make_plan`, with alike layers at most BRIEF times and all tasks on SM 0.

    What it decides for the first layer that repeats holds for all but the last, and what it decides for the last one
    for the last. A program without such layers is planned as it is.
    """
    variant, layers = variant_of(program), local_layers(program)
    if layers is None:
        return _planned(program, variant)
    return _planned(repeated(program, min(layers.times, BRIEF)), variant, polls=not shares_pages(program))


def _planned(
    program: MegakernelProgram, variant: KernelVariant, exchanged: frozenset[int] = frozenset(), polls: bool = True
) -> Plan:
    """`polls` says whether hand-offs may be by data, as far as the variant says so."""
    grouping = group_tasks(program.tasks)
    sampled = sampled_of(grouping.firsts) if exchanged else frozenset[int]()
    polls = polls and variant.data_hand_offs
    by = by_data(program, grouping, exchanged, sampled) if polls else by_counters(program, grouping)
    return Plan(program, variant, grouping, by, *queues_of(program))


def rank_plans(program: MegakernelProgram) -> tuple[Plan, ...]:
    """The plans of all GPUs of a program, by rank. `validate(strict=True)` must accept the program.

    Raises ConfigError and InvalidProgramError as `make_plan` and `parts_of`.
    """
    return tuple(map(_rank_plan, parts_of(program)))


def _rank_plan(part: RankPart) -> Plan:
    plan = _planned(part.program, variant_of(part.program), part.arrived.union(part.away))
    rows = {row for row, buffer in enumerate(part.program.buffers) if buffer.id in part.arrived}
    away = {row for row, buffer in enumerate(part.program.buffers) if buffer.id in part.away}
    hand_offs = replace(plan.hand_offs, awaited=plan.hand_offs.awaited - away | rows)
    return replace(plan, variant=replace(plan.variant, ranked=True), hand_offs=hand_offs, part=part)


def queues_of(program: MegakernelProgram) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`order` and `first` of a plan.

    Raises InvalidProgramError for a program of several GPUs, and for a task without an SM, which it names.
    """
    if program.ranks > 1:
        raise InvalidProgramError(f"program: has {program.ranks} ranks, but a plan is of one GPU")
    num_sms = program.target.num_sms if program.target is not None else 0
    tasks = program.tasks
    placed = tasks.sms if isinstance(tasks, Runs) else [-1 if task.sm is None else task.sm for task in tasks]
    sms = np.array(placed, np.int64)
    if len(sms) and not 0 <= sms.min() <= sms.max() < num_sms:
        task = next(task for task in tasks if task.sm is None or not 0 <= task.sm < num_sms)
        raise InvalidProgramError(f"task {task.id} ({task.label}): sm={task.sm} is not in 0..{num_sms - 1}")
    # numpy sorts 16-bit numbers by radix, and a target's SMs fit into 16 bits.
    order = np.argsort(sms.astype(np.uint16) if num_sms <= 1 << 16 else sms, kind="stable")
    return order, np.concatenate(([0], np.cumsum(np.bincount(sms, minlength=num_sms))))
