"""What the CUDA VM makes of a program before anything is packed: nodes, hand-offs, block layout; and its identity.

`plan.program` makes the plan. It is not here, since numpy is slow to import and lowering needs the block layout alone.
"""

from flywheel.plan.identity import program_id
from flywheel.plan.variant import KernelVariant, kernel_variant, variant_of

__all__ = ["KernelVariant", "kernel_variant", "program_id", "variant_of"]
