"""The plan of a program: what the packer packs and the cost model prices, made once for both."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.ir import MegakernelProgram
from flywheel.plan.handoff import HandOffs, by_counters, by_data
from flywheel.plan.nodes import Grouping, group_tasks
from flywheel.plan.variant import KernelVariant, variant_of


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A program, the block that runs it, its tasks by node, and how nodes learn that what they read is there."""

    program: MegakernelProgram
    variant: KernelVariant
    grouping: Grouping
    hand_offs: HandOffs

    @property
    def x_slices(self) -> int:
        """Slices in which an input that fits may be multiplied: a counter says nothing of a part."""
        return self.variant.x_slices if self.hand_offs.awaited else 1


def make_plan(program: MegakernelProgram) -> Plan:
    """The plan of a program that `validate(strict=True)` accepts. Raises ConfigError as `variant_of` does."""
    variant, grouping = variant_of(program), group_tasks(program.tasks)
    decide = by_data if variant.data_hand_offs else by_counters
    return Plan(program, variant, grouping, decide(program, grouping))
