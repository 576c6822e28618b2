"""abi.h, read as text, against the IR's tables and the numpy structs: no code of the generator is trusted here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flywheel import ir
from flywheel.plan import formats, scratch, staging, step, variant
from flywheel.vm import abi

HEADER = Path(__file__).parents[1] / "flywheel" / "vm" / "cuda" / "abi.h"

CODES: dict[str, type[IntEnum]] = {
    "AMK_OP_": ir.InstructionKind,
    "AMK_DTYPE_": ir.DType,
    "AMK_MEMSPACE_": ir.MemSpace,
    "FW_EPILOGUE_": step.Epilogue,
    "FW_CODE_": formats.Code,
    "FW_SCALES_": formats.ScalePlacement,
    "FW_LAYOUT_": abi.Layout,
    "FW_STAMP_": abi.Stamp,
    "FW_TIE_": abi.Tie,
    "FW_ANCHOR_": abi.Anchor,
    "FW_FAULT_": abi.Fault,
}
FLAGS: dict[str, Any] = {
    "FW_STEP_": abi.StepFlag,
    "FW_INSTRUCTION_": abi.InstructionFlag,
    "FW_SEGMENT_": abi.SegmentFlag,
}
CAPS = {
    "AMK_MAX_INPUTS": ir.ABI_MAX_INPUTS,
    "AMK_MAX_OUTPUTS": ir.ABI_MAX_OUTPUTS,
    "AMK_MAX_WAITS": ir.ABI_MAX_WAITS,
    "AMK_MAX_RANK": ir.ABI_MAX_RANK,
    "AMK_ABI_VERSION_MAJOR": int(ir.ABI_VERSION.split(".")[0]),
    "AMK_ABI_VERSION_MINOR": int(ir.ABI_VERSION.split(".")[1]),
    "FW_MAX_STEPS": step.MAX_STEPS,
    "FW_MAX_ROWS": ir.ABI_MAX_ROWS,
    "FW_MAX_RANKS": ir.MAX_RANKS,
    "FW_NO_TOKEN": ir.NO_TOKEN,
    "FW_FRAGMENT_ROWS": staging.FRAGMENT_ROWS,
    "FW_FRAGMENT_K": staging.FRAGMENT_K,
    "FW_RESULT_REF": step.RESULT_REF,
    "FW_SPILLED": scratch.SPILLED,
    "FW_ABSENT": step.ABSENT,
    "FW_COUNTER_STRIDE": abi.COUNTER_STRIDE,
    "FW_PEERS_SHIFT": abi.PEERS_SHIFT,
    "FW_RESERVED_BYTES": variant.RESERVED_BYTES,
    "FW_PARTIALS_BYTES": staging.PARTIALS_BYTES,
    "FW_MIN_STAGED_BYTES": staging.MIN_STAGED_BYTES,
    "FW_WORK_BYTES": staging.WORK_BYTES,
    "FW_MAX_RING_SLOTS": variant.MAX_RING_SLOTS,
    "FW_MAX_X_SCALES": staging.MAX_X_SCALES,
    "FW_X_BLOCK": staging.X_BLOCK,
    "FW_WARP": variant.WARP,
    "FW_BULK_COPY_ARCH": 900,
    "FW_FORMAT_SHIFT": abi.FORMAT_SHIFT,
    "FW_FORMAT_MASK": abi.FORMAT_MASK,
    "FW_TAIL_SHIFT": abi.TAIL_SHIFT,
    "FW_TAIL_MASK": abi.TAIL_MASK,
    "FW_UNIT_SHIFT": abi.UNIT_SHIFT,
    "FW_UNIT_ALIGNMENT": formats.UNIT_ALIGNMENT,
}
SIZES = {"uint64_t": 8, "int64_t": 8, "uint32_t": 4, "int32_t": 4, "float": 4, "int16_t": 2}
NUMPY = {"uint64_t": "u8", "int64_t": "i8", "uint32_t": "u4", "int32_t": "i4", "float": "f4", "int16_t": "i2"}

Members = list[tuple[str, str, int]]
"""(C type, name, count) in order."""

DEFINE = re.compile(r"^#define (\w+) \(?(-?\d+)\)?$", re.M)
STRUCT = re.compile(r"^(?:struct|union) (\w+) \{\n(.*?)^\};$", re.M | re.S)
MEMBER = re.compile(r"^  (\w+) (\w+)(?:\[(\d+)\])?;(?:  // .*)?$", re.M)
SIZE = re.compile(r'^static_assert\(sizeof\((\w+)\) == (\d+), ".*"\);$', re.M)
OFFSET = re.compile(r"^FW_ASSERT_OFFSET\((\w+), (\w+), (\d+)\);$", re.M)


def structs_of(text: str) -> dict[str, Members]:
    return {
        name: [(kind, member, int(count or 1)) for kind, member, count in MEMBER.findall(body)]
        for name, body in STRUCT.findall(text)
    }


def laid_out(name: str, structs: Mapping[str, Members]) -> tuple[dict[str, int], int, int]:
    """(offsets of the members, size, alignment) by the rules of C."""
    offsets: dict[str, int] = {}
    end, widest = 0, 1
    for kind, member, count in structs[name]:
        size, align = (SIZES[kind], SIZES[kind]) if kind in SIZES else laid_out(kind, structs)[1:]
        offsets[member] = 0 if name in abi.UNIONS else -(-end // align) * align
        end = max(end, offsets[member] + size * count)
        widest = max(widest, align)
    return offsets, -(-end // widest) * widest, widest


def drifts(
    text: str,
    codes: Mapping[str, type[IntEnum]] = CODES,
    caps: Mapping[str, int] = CAPS,
    numpy_struct: Callable[[str], Any] = abi.numpy_struct,
    param_fields: Mapping[str, str] = ir.PARAM_FIELDS,
) -> list[str]:
    """What differs between the header and the tables of the IR and of numpy, by name."""
    found = []
    defines = {name: int(value) for name, value in DEFINE.findall(text)}
    for prefix, members in (codes | FLAGS).items():  # type: ignore[operator]
        wanted = {f"{prefix}{member.name}": int(member) for member in members}
        given = {name: value for name, value in defines.items() if name.startswith(prefix)}
        found += [name for name in sorted(wanted.keys() | given.keys()) if wanted.get(name) != given.get(name)]
    found += [name for name, value in caps.items() if defines.get(name) != value]
    structs = structs_of(text)
    found += sorted(structs.keys() ^ set(abi.STRUCTS))
    sizes = {name: int(size) for name, size in SIZE.findall(text)}
    asserted = {(name, member): int(offset) for name, member, offset in OFFSET.findall(text)}
    for name in structs.keys() & set(abi.STRUCTS):
        offsets, size, _ = laid_out(name, structs)
        layout = numpy_struct(name)
        if not sizes.get(name) == size == layout.itemsize:
            found.append(f"sizeof {name}")
        if list(layout.names) != [member for _, member, _ in structs[name]]:
            found.append(f"members of {name}")
            continue
        for kind, member, count in structs[name]:
            base, offset = layout.fields[member][:2]
            element, shape = base.subdtype or (base, ())
            wanted_type = np.dtype(NUMPY[kind]) if kind in NUMPY else numpy_struct(kind)
            if element != wanted_type or shape != ((count,) if count > 1 else ()):
                found.append(f"type of {name}.{member}")
            if not asserted.get((name, member)) == offsets[member] == offset:
                found.append(f"offset of {name}.{member}")
    kinds = {"i": "int32_t", "f": "float"}
    if structs.get("amk_params_t") != [(kinds[kind], name, 1) for name, kind in param_fields.items()]:
        found.append("params")
    return found


@pytest.fixture(scope="module")
def header() -> str:
    return HEADER.read_text(encoding="utf-8")


def test_the_header_says_what_the_tables_say(header: str) -> None:
    assert drifts(header) == []


def test_the_header_is_read_whole(header: str) -> None:
    assert len(structs_of(header)) == header.count("\nstruct ") + header.count("\nunion ")
    assert set(re.findall(r"^union (\w+)", header, re.M)) == abi.UNIONS
    assert sum(len(members) for members in structs_of(header).values()) == header.count("\nFW_ASSERT_OFFSET(")
    assert len(DEFINE.findall(header)) == header.count("#define") - header.count("#define FW_ASSERT_OFFSET(")


def test_every_constant_of_the_header_is_compared(header: str) -> None:
    compared = (*CODES, *FLAGS)
    names = [name for name, _ in DEFINE.findall(header) if not name.startswith(compared)]
    assert sorted(names) == sorted(CAPS)


def test_instructions_carry_the_capacities_of_the_abi(header: str) -> None:
    members = {member: count for _, member, count in structs_of(header)["amk_instruction_t"]}
    names = ("inputs", "outputs", "wait_counter", "wait_threshold")
    assert [members[name] for name in names] == [8, 4, 8, 8]
    assert {member: count for _, member, count in structs_of(header)["amk_buffer_t"]}["shape"] == 4


def test_a_row_of_a_trace_holds_every_stamp_and_every_anchor() -> None:
    assert abi.numpy_struct("amk_trace_t")["at"].shape == (1 + max(*abi.Stamp, *abi.Tie, *abi.Anchor),)


@pytest.mark.parametrize(
    ("old", "new", "drift"),
    [
        ("#define AMK_OP_ADD 11", "#define AMK_OP_ADD 12", "AMK_OP_ADD"),
        ("#define AMK_OP_FUSED 19\n", "", "AMK_OP_FUSED"),
        ("#define AMK_OP_FUSED 19", "#define AMK_OP_FUSED 19\n#define AMK_OP_CONV 20", "AMK_OP_CONV"),
        ("#define AMK_DTYPE_BF16 2", "#define AMK_DTYPE_BF16 1", "AMK_DTYPE_BF16"),
        ("#define AMK_MAX_INPUTS 8", "#define AMK_MAX_INPUTS 6", "AMK_MAX_INPUTS"),
        ("#define AMK_ABI_VERSION_MINOR 2", "#define AMK_ABI_VERSION_MINOR 3", "AMK_ABI_VERSION_MINOR"),
        ("#define FW_STEP_STAGE 32", "#define FW_STEP_STAGE 33", "FW_STEP_STAGE"),
        ("  int32_t hidden;\n  float eps;", "  float eps;\n  int32_t hidden;", "members of amk_params_t"),
        ("  float eps;", "  int32_t eps;", "type of amk_params_t.eps"),
        ("  int32_t rank;", "  int64_t rank;", "sizeof amk_buffer_t"),
        ("inputs[8];", "inputs[7];", "type of amk_instruction_t.inputs"),
        ("sizeof(amk_step_t) == 128", "sizeof(amk_step_t) == 132", "sizeof amk_step_t"),
        ("OFFSET(amk_step_t, params, 60)", "OFFSET(amk_step_t, params, 64)", "offset of amk_step_t.params"),
        ("OFFSET(amk_step_kind_t, rope, 0)", "OFFSET(amk_step_kind_t, rope, 8)", "offset of amk_step_kind_t.rope"),
    ],
)
def test_a_header_that_drifts_is_found_out(header: str, old: str, new: str, drift: str) -> None:
    assert header.count(old) >= 1
    assert drift in drifts(header.replace(old, new, 1))


def test_tables_that_drift_are_found_out(header: str) -> None:
    codes = {kind.name: kind.value for kind in ir.InstructionKind}
    grown = IntEnum("Grown", {**codes, "CONV": max(codes.values()) + 1})  # type: ignore[misc]
    assert drifts(header, codes=CODES | {"AMK_OP_": grown}) == ["AMK_OP_CONV"]
    swapped = IntEnum("Swapped", {"F32": 1, "F16": 0, **{kind.name: kind.value for kind in list(ir.DType)[2:]}})  # type: ignore[misc]
    assert drifts(header, codes=CODES | {"AMK_DTYPE_": swapped}) == ["AMK_DTYPE_F16", "AMK_DTYPE_F32"]
    assert drifts(header, caps=CAPS | {"AMK_MAX_WAITS": 16}) == ["AMK_MAX_WAITS"]
    names = list(ir.PARAM_FIELDS)
    reordered = {name: ir.PARAM_FIELDS[name] for name in (names[1], names[0], *names[2:])}
    assert drifts(header, param_fields=reordered) == ["params"]


def test_numpy_structs_that_drift_are_found_out(header: str) -> None:
    def shorter(name: str) -> Any:
        layout = abi.numpy_struct(name)
        if name != "amk_segment_t":
            return layout
        return np.dtype([(member, layout.fields[member][0]) for member in layout.names[:-1]])

    assert set(drifts(header, numpy_struct=shorter)) == {"sizeof amk_segment_t", "members of amk_segment_t"}
