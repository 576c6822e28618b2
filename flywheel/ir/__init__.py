"""The megakernel IR, which defines a program. Everything public can be imported from here."""

from flywheel.ir.compressed import Run, Runs, Stretch, Tile, Tiles
from flywheel.ir.config import ScheduleConfig, config_from_dict, config_to_dict
from flywheel.ir.dag import dependency_edges, topological_order
from flywheel.ir.dtype import COMPUTE_DTYPES, PER_SM_SPACES, READONLY_KINDS, BufferKind, DType, MemSpace
from flywheel.ir.opcodes import (
    INHERITED_PARAMS,
    PARAM_FIELDS,
    RECIPE_PARAM_FIELDS,
    TASK_PARAM_FIELDS,
    InstructionKind,
    KvRows,
)
from flywheel.ir.operations import OPERATIONS, Operation
from flywheel.ir.positions import at_position
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.serde import load_program, program_from_dict, program_from_json
from flywheel.ir.simulate import simulate_adversarial, simulate_counters, try_orders
from flywheel.ir.target import TARGETS, GpuTarget
from flywheel.ir.validate import Finding, ValidationResult, validate
from flywheel.ir.version import (
    ABI_MAX_INPUTS,
    ABI_MAX_OUTPUTS,
    ABI_MAX_RANK,
    ABI_MAX_ROWS,
    ABI_MAX_WAITS,
    ABI_VERSION,
    IR_VERSION,
    MAX_RANKS,
    NO_TOKEN,
)
from flywheel.ir.writing import program_pieces, program_to_dict, program_to_json, save_program

__all__ = [
    "ABI_MAX_INPUTS",
    "ABI_MAX_OUTPUTS",
    "ABI_MAX_RANK",
    "ABI_MAX_ROWS",
    "ABI_MAX_WAITS",
    "ABI_VERSION",
    "COMPUTE_DTYPES",
    "INHERITED_PARAMS",
    "IR_VERSION",
    "MAX_RANKS",
    "NO_TOKEN",
    "OPERATIONS",
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
    "KvRows",
    "MegakernelProgram",
    "MemSpace",
    "Operation",
    "Page",
    "PageAllocation",
    "Run",
    "Runs",
    "ScheduleConfig",
    "Stretch",
    "Task",
    "Tile",
    "Tiles",
    "ValidationResult",
    "Wait",
    "at_position",
    "config_from_dict",
    "config_to_dict",
    "dependency_edges",
    "load_program",
    "program_from_dict",
    "program_from_json",
    "program_pieces",
    "program_to_dict",
    "program_to_json",
    "save_program",
    "simulate_adversarial",
    "simulate_counters",
    "topological_order",
    "try_orders",
    "validate",
]
