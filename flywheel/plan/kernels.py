"""What there are kernels for: opcodes, the steps that they say, and architectures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import InstructionKind
from flywheel.ir.operations import OPERATIONS, Kernel

KERNELS: Final[Mapping[InstructionKind, Kernel]] = MappingProxyType(
    {op: row.kernel for op, row in OPERATIONS.items() if row.kernel is not None}
)
"""What runs each opcode on the device. NOP has nothing to run, and FUSED is its steps."""

ARCHITECTURES: Final[Mapping[int, str]] = MappingProxyType(
    {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120"}
)
"""`sm_arch` of a target -> the architecture that its kernels are compiled for."""

HEAD_DIMS: Final = range(64, 257, 16)
"""Head sizes of attention on tensor cores. Other heads, up to MAX_HEAD_DIM, are attended to by slower code."""

USUAL_HEAD_DIMS: Final = (64, 128)
"""Those that a kernel has code for if its program has no others (`plan.features`)."""

MAX_STREAMED_HEADS: Final = 8
"""Most query heads of a KV head that attend to streamed rows: the columns of a matrix fragment."""

BULK_COPY_ARCH: Final = 90
"""First `sm_arch` whose loader can move a whole chunk with one instruction."""


def arch_name(sm_arch: int) -> str:
    """The architecture that kernels for `sm_arch` are compiled for. Raises ConfigError for an unsupported one."""
    if sm_arch not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise ConfigError(f"sm_arch={sm_arch}: there are kernels for {known}")
    return ARCHITECTURES[sm_arch]
