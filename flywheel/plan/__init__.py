"""What the CUDA VM makes of a program before anything is packed: its block layout, and what identifies it."""

from flywheel.plan.identity import program_id
from flywheel.plan.variant import KernelVariant, kernel_variant, variant_of

__all__ = ["KernelVariant", "kernel_variant", "program_id", "variant_of"]
