"""What the CUDA VM makes of a program before anything is packed: nodes, hand-offs, block layout; and its identity."""

from flywheel.plan.identity import program_id
from flywheel.plan.program import Plan, make_plan
from flywheel.plan.variant import KernelVariant, kernel_variant, variant_of

__all__ = ["KernelVariant", "Plan", "kernel_variant", "make_plan", "program_id", "variant_of"]
