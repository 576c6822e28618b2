"""The JSON Schema of the program file, generated from the records: `python -m flywheel.ir.schema [PATH]` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from flywheel.ir.config import ScheduleConfig
from flywheel.ir.dtype import DType
from flywheel.ir.opcodes import MAX_TABLE, RECIPE_PARAM_FIELDS, TASK_PARAM_FIELDS, InstructionKind
from flywheel.ir.operations import OPERATIONS, Operation
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.target import GpuTarget
from flywheel.ir.version import ABI_MAX_RANK, IR_VERSION

Schema = dict[str, Any]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
DEFAULT_PATH: Final = Path("docs/ir.schema.json")

_RECORDS: Final = (MegakernelProgram, GpuTarget, Buffer, Counter, Task, Wait, PageAllocation, Page, ScheduleConfig)
_SCALARS: Final[Mapping[Any, Schema]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    NoneType: {"type": "null"},
    Any: {},
}
_PARAM_TYPES: Final[Mapping[str, Schema]] = {
    "i": _SCALARS[int],
    "f": _SCALARS[float],
    "t": {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 1, "maxItems": MAX_TABLE},
}
_ALWAYS_WRITTEN: Final = ("ir_version", "buffers", "counters", "tasks")
"""Fields that a file must have although the record has defaults for them."""


def json_schema() -> Schema:
    """The schema of a program file, with operands and params from the table of operations.

    A file that the schema accepts can be loaded. Whether the program is safe is decided by `validate`.
    """
    defs = {record.__name__: _record(record) for record in _RECORDS}
    program = defs.pop(MegakernelProgram.__name__)
    program["required"] = list(_ALWAYS_WRITTEN)
    program["properties"]["ir_version"] = {"type": "string", "pattern": rf"^{IR_VERSION.split('.')[0]}(\.|$)"}
    params = {name: _PARAM_TYPES[kind] for name, kind in TASK_PARAM_FIELDS.items()}
    defs["Task"]["properties"]["params"] = {
        "type": "object",
        "properties": {**params, "recipe": {"$ref": "#/$defs/Recipe"}},
    }
    defs["Task"]["allOf"] = [
        {"if": {"properties": {"op": {"const": row.kind.name}}}, "then": _task_of(row)} for row in OPERATIONS.values()
    ]
    return {
        "$schema": DIALECT,
        "title": f"flywheel megakernel program, ir_version {IR_VERSION}",
        **program,
        "$defs": {**defs, "Recipe": _recipe()},
    }


def _task_of(row: Operation) -> Schema:
    """The operands and params of a task with that opcode, by the table of operations."""

    def as_many(bounds: tuple[int, int]) -> Schema:
        return {"minItems": bounds[0], "maxItems": bounds[1]}

    operands = {"inputs": as_many(row.arity), "outputs": as_many(row.n_outputs)}
    return {"properties": {**operands, "params": {"required": list(row.params)}} if row.params else operands}


def _record(record: type) -> Schema:
    """The schema of one record. Fields without a default are required. Unknown fields are allowed, and dropped on
    load."""
    hints = get_type_hints(record)
    own = fields(record)
    required = [field.name for field in own if field.default is MISSING and field.default_factory is MISSING]
    return {
        "description": (record.__doc__ or "").split("\n")[0],
        "type": "object",
        "properties": {field.name: _type(hints[field.name]) for field in own},
        **({"required": required} if required else {}),
    }


def _type(hint: Any) -> Schema:
    """The schema of a field's type in the file: enums by name, maps with text keys, sequences as arrays."""
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return {"anyOf": [_type(argument) for argument in arguments]}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_type(each) for each in arguments], "minItems": len(arguments),
                "maxItems": len(arguments)}  # fmt: skip
    if origin is Sequence:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is Mapping:
        keys = {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}} if arguments[0] is int else {}
        return {"type": "object", **keys, "additionalProperties": _type(arguments[1])}
    if isinstance(hint, type) and is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return _enum(hint)


def _enum(kind: type[IntEnum]) -> Schema:
    return {"enum": list(kind.__members__)}


def _recipe() -> Schema:
    slot = {"type": "integer", "minimum": 0}

    def only(name: str) -> Schema:
        return {"type": "object", "properties": {name: slot}, "required": [name], "additionalProperties": False}

    step = {
        "type": "object",
        "properties": {
            "op": _enum(InstructionKind),
            "args": {"type": "array", "items": {"anyOf": [only("in"), only("s")]}},
            "out": {"anyOf": [slot, {"const": "final"}, only("out")]},
            "params": {
                "type": "object",
                "properties": {name: _PARAM_TYPES[kind] for name, kind in RECIPE_PARAM_FIELDS.items()},
                "additionalProperties": False,
            },
            "out_shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1},
                "minItems": 1,
                "maxItems": ABI_MAX_RANK,
            },
            "out_dtype": _enum(DType),
        },
        "required": ["op", "args", "out", "out_shape", "out_dtype"],
    }
    return {
        "description": "Primitive steps of a FUSED task, run in order.",
        "type": "object",
        "properties": {"steps": {"type": "array", "items": step, "minItems": 1}},
        "required": ["steps"],
    }


def schema_text() -> str:
    """The text of the schema file in the repository."""
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PATH).write_text(schema_text(), encoding="utf-8")
