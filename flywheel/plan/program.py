"""The plan of a program: all that is decided before it is packed. The packer encodes it, and the cost model prices it.

Predictions and proofs of a search ask `check_program`, so that both refuse the same programs in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import Buffer, MegakernelProgram
from flywheel.ir.compressed import NO_LAYERS, as_runs, layers_of, local_layers, repeated
from flywheel.ir.program import once
from flywheel.plan.adding import adding_products, sums_of
from flywheel.plan.handoff import HandOffs, by_counters, by_data, sampled_of, shares_pages
from flywheel.plan.kernels import arch_name
from flywheel.plan.nodes import Grouping, group_tasks
from flywheel.plan.past import streamed_tasks
from flywheel.plan.ranks import RankPart, parts_of
from flywheel.plan.routines import Routines, routines_of
from flywheel.plan.sharing import staged_tasks
from flywheel.plan.variant import KernelVariant, variant_of

BRIEF: Final = 2
"""Times that a template comes in a program that shows all hand-offs. A task that polls a counter is in the counter's
layer or the next one, so the first layer stands for all but the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A program, the layout of its blocks, its tasks by node, its hand-offs, and the routines of its tasks.

    `order` holds places in `program.tasks`, SM by SM, and in list order on each SM. The places of SM s are
    `order[first[s] : first[s + 1]]`.
    """

    program: MegakernelProgram
    variant: KernelVariant
    grouping: Grouping
    hand_offs: HandOffs
    order: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    found: Routines | InvalidProgramError
    """The tasks' routines, or why no kernels run the program."""
    part: RankPart | None = None
    """The part of one GPU of several; None where one GPU runs the program alone."""

    @property
    def routines(self) -> Routines:
        """The tasks' routines. Raises InvalidProgramError, which names the task, if the kernels cannot run it."""
        if isinstance(self.found, InvalidProgramError):
            raise self.found
        return self.found

    @property
    def sums(self) -> npt.NDArray[np.bool_]:
        """By place in the program's list: whether the task only adds the shards of all GPUs."""
        if self.part is None:
            return np.zeros(len(self.order), np.bool_)
        return sums_of(self.grouping, self.routines, self.program.buffers, self.part)

    def adds(self, products: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which tasks add what the sum right behind them on their SM would add; see `adding_products`."""
        if self.part is None:
            return np.zeros(len(sums), np.bool_)
        return adding_products(self.grouping, self.routines, self.hand_offs, self.part, products, sums)

    @property
    def streamed(self) -> npt.NDArray[np.bool_]:
        """By place in the program's list: whether the loader streams the rows of caches that the task attends to."""
        return streamed_tasks(self.grouping, self.routines, self.variant)

    @property
    def adding(self) -> npt.NDArray[np.int64]:
        """The places in `order` of products that add what the next task would add."""
        order, sms = self.order, self.sms
        places = np.flatnonzero(self.sums[order[1:]] & (sms[:-1] == sms[1:]))
        return places[self.adds(order[places], order[places + 1])]

    @property
    def staged(self) -> npt.NDArray[np.bool_]:
        """Which entries of `order` find their operand staged by the task before them."""
        made = self.routines
        return staged_tasks(made.shared, made.nodes, self.grouping.node_of[self.order], self.sms)

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
    """The plan of a program of one GPU, as `make_plan`, with alike layers fewer times and all tasks on SM 0.

    They come once, or BRIEF times where hand-offs may be by data: then, what it decides for the first layer that
    repeats holds for all but the last. A program without such layers is planned as it is.
    """
    variant, layers = variant_of(program), local_layers(program)
    if layers is NO_LAYERS:
        # A copy, since `once` may keep no answer that refers to its program.
        return _planned(replace(program, tasks=as_runs(program)), variant)
    polls = variant.data_hand_offs and not shares_pages(program)
    return _planned(repeated(program, min(layers.times, BRIEF if polls else 1)), variant, polls=polls)


@once
def brief_rank_plans(program: MegakernelProgram) -> tuple[Plan, ...]:
    """The plans of all GPUs of a program, as `rank_plans`, with alike layers BRIEF times and all tasks on SM 0."""
    return rank_plans(repeated(program, min(layers_of(program).times, BRIEF)))


def _planned(
    program: MegakernelProgram, variant: KernelVariant, part: RankPart | None = None, polls: bool = True
) -> Plan:
    """`polls` says whether hand-offs may be by data, as far as the variant says so."""
    grouping = group_tasks(program)
    exchanged = part.arrived | part.away if part is not None else frozenset[int]()
    sampled = sampled_of(grouping.firsts) if exchanged else frozenset[int]()
    polls = polls and variant.data_hand_offs
    by = by_data(program, grouping, exchanged, sampled) if polls else by_counters(program, grouping)
    once = by.awaited
    if part is not None:
        arrived, away = (rows_of(program.buffers, numbers) for numbers in (part.arrived, part.away))
        by, variant = replace(by, awaited=by.awaited - away | arrived), replace(variant, ranked=True)
    order, first = queues_of(program)
    found: Routines | InvalidProgramError
    try:
        found = routines_of(program, grouping, variant, once, part)
    except InvalidProgramError as error:
        found = error
    return Plan(program, variant, grouping, by, order, first, found, part)


def rank_plans(program: MegakernelProgram) -> tuple[Plan, ...]:
    """The plans of all GPUs of a program, by rank. `validate(strict=True)` must accept the program.

    Raises ConfigError and InvalidProgramError as `make_plan` and `parts_of`.
    """
    plans = tuple([_planned(part.program, variant_of(part.program), part) for part in parts_of(program)])
    made = [plan.found for plan in plans if isinstance(plan.found, Routines)]
    if len({each.best is not None and each.best.shared for each in made}) <= 1:
        return plans
    # The largest logit of all ranks needs that of each rank.
    return tuple([
        replace(plan, found=replace(plan.found, best=None)) if isinstance(plan.found, Routines) else plan
        for plan in plans
    ])  # fmt: skip


def check_program(program: MegakernelProgram) -> None:
    """Check that the kernels can run a program that `validate(strict=True)` accepts, on a GPU such as its target.

    Raises ConfigError for a target and a config without a kernel variant, and InvalidProgramError as packing does. Of
    alike layers it looks at BRIEF, unless it finds a fault: then at all of them, to name the task as packing does.
    """
    variant = variant_of(program)
    if program.ranks == 1:
        queues_of(program)
    try:
        _check((brief_plan(program),) if program.ranks == 1 else brief_rank_plans(program))
    except InvalidProgramError:
        _check((make_plan(program),) if program.ranks == 1 else rank_plans(program))
    arch_name(variant.sm_arch)


def _check(plans: Sequence[Plan]) -> None:
    for plan in plans:
        if isinstance(plan.found, InvalidProgramError):
            raise plan.found


def refusal_of(program: MegakernelProgram) -> str | None:
    """Why `check_program` refuses a program, in its words; None where it does not."""
    try:
        check_program(program)
    except (ConfigError, InvalidProgramError) as error:
        return str(error)
    return None


def rows_of(buffers: Sequence[Buffer], numbers: Set[int]) -> frozenset[int]:
    """The rows of buffers with these ids."""
    return frozenset([row for row, buffer in enumerate(buffers) if buffer.id in numbers])


def queues_of(program: MegakernelProgram) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`order` and `first` of a plan.

    Raises InvalidProgramError for a program of several GPUs, and for a task without an SM, which it names.
    """
    if program.ranks > 1:
        raise InvalidProgramError(f"program: has {program.ranks} ranks, but a plan is of one GPU")
    num_sms = program.target.num_sms if program.target is not None else 0
    tasks = program.tasks
    sms = np.array(as_runs(program).sms, np.int64)
    if len(sms) and not 0 <= sms.min() <= sms.max() < num_sms:
        task = next(task for task in tasks if task.sm is None or not 0 <= task.sm < num_sms)
        raise InvalidProgramError(f"task {task.id} ({task.label}): sm={task.sm} is not in 0..{num_sms - 1}")
    # numpy sorts 16-bit numbers by radix, and a target's SMs fit into 16 bits.
    order = np.argsort(sms.astype(np.uint16) if num_sms <= 1 << 16 else sms, kind="stable")
    return order, np.concatenate(([0], np.cumsum(np.bincount(sms, minlength=num_sms))))
