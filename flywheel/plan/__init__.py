"""The plan of a program for the CUDA VM, made before anything is packed: nodes, hand-offs and block layout. Also a
program's identity.

`plan.program` makes the plan. This module does not import it: numpy is slow to import, and lowering needs the block
layout alone.
"""

from flywheel.plan.identity import is_another, is_current, program_id
from flywheel.plan.variant import KernelVariant, kernel_variant, variant_of

__all__ = ["KernelVariant", "is_another", "is_current", "kernel_variant", "program_id", "variant_of"]
