"""The megakernel IR: what a program is. Everything public is importable from here."""

from flywheel.ir.config import ScheduleConfig
from flywheel.ir.dtype import PER_SM_SPACES, READONLY_KINDS, BufferKind, DType, MemSpace
from flywheel.ir.identity import program_id
from flywheel.ir.opcodes import (
    INHERITED_PARAMS,
    OP_REGISTRY,
    PARAM_FIELDS,
    RECIPE_PARAM_FIELDS,
    TASK_PARAM_FIELDS,
    InstructionKind,
    KvRows,
    OpSpec,
)
from flywheel.ir.positions import at_position
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.target import TARGETS, GpuTarget
from flywheel.ir.validate import Finding, ValidationResult, validate
from flywheel.ir.variant import KernelVariant, kernel_variant, variant_of
from flywheel.ir.version import (
    ABI_MAX_INPUTS,
    ABI_MAX_OUTPUTS,
    ABI_MAX_RANK,
    ABI_MAX_WAITS,
    ABI_VERSION,
    IR_VERSION,
)

__all__ = [
    "ABI_MAX_INPUTS",
    "ABI_MAX_OUTPUTS",
    "ABI_MAX_RANK",
    "ABI_MAX_WAITS",
    "ABI_VERSION",
    "INHERITED_PARAMS",
    "IR_VERSION",
    "OP_REGISTRY",
    "PARAM_FIELDS",
    "PER_SM_SPACES",
    "READONLY_KINDS",
    "RECIPE_PARAM_FIELDS",
    "TARGETS",
    "TASK_PARAM_FIELDS",
    "Buffer",
    "BufferKind",
    "Counter",
    "DType",
    "Finding",
    "GpuTarget",
    "InstructionKind",
    "KernelVariant",
    "KvRows",
    "MegakernelProgram",
    "MemSpace",
    "OpSpec",
    "Page",
    "PageAllocation",
    "ScheduleConfig",
    "Task",
    "ValidationResult",
    "Wait",
    "at_position",
    "kernel_variant",
    "program_id",
    "validate",
    "variant_of",
]
