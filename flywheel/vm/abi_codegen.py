"""The C side of the device ABI: `cuda/abi.h`, `cuda/opcodes.cuh`, `cuda/formats.cuh` and `cuda/dispatch.cuh`, written
from the tables of the IR, of the plan and abi.py.

`python -m flywheel.vm.abi_codegen` writes the files; with `--check` it changes nothing, and fails with one line where
a file is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum, IntFlag
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flywheel.ir import (
    ABI_MAX_INPUTS,
    ABI_MAX_OUTPUTS,
    ABI_MAX_RANK,
    ABI_MAX_ROWS,
    ABI_MAX_WAITS,
    ABI_VERSION,
    MAX_RANKS,
    NO_TOKEN,
    DType,
    InstructionKind,
    MemSpace,
)
from flywheel.ir.operations import PRODUCTS, Kernel
from flywheel.plan import kernels
from flywheel.plan.formats import FORMATS, UNIT_ALIGNMENT, Code, ScalePlacement
from flywheel.plan.scratch import SPILLED
from flywheel.plan.staging import (
    FRAGMENT_K,
    FRAGMENT_ROWS,
    MAX_X_SCALES,
    MIN_STAGED_BYTES,
    PARTIALS_BYTES,
    WORK_BYTES,
    X_BLOCK,
)
from flywheel.plan.step import ABSENT, MAX_STEPS, RESULT_REF, Epilogue
from flywheel.plan.variant import MAX_RING_SLOTS, RESERVED_BYTES, WARP
from flywheel.vm import abi

CUDA: Final = Path(__file__).parent / "cuda"

PREFIXES: Final[Mapping[str, type[IntEnum] | type[IntFlag]]] = MappingProxyType(
    {
        "AMK_OP": InstructionKind,
        "AMK_DTYPE": DType,
        "AMK_MEMSPACE": MemSpace,
        "FW_INSTRUCTION": abi.InstructionFlag,
        "FW_STEP": abi.StepFlag,
        "FW_EPILOGUE": Epilogue,
        "FW_SEGMENT": abi.SegmentFlag,
        "FW_CODE": Code,
        "FW_SCALES": ScalePlacement,
        "FW_LAYOUT": abi.Layout,
        "FW_STAMP": abi.Stamp,
        "FW_TIE": abi.Tie,
        "FW_ANCHOR": abi.Anchor,
        "FW_FAULT": abi.Fault,
    }
)
"""What the members of each enumeration start with in C."""

_MAJOR, _MINOR = (int(part) for part in ABI_VERSION.split("."))

CONSTANTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "AMK_ABI_VERSION_MAJOR": _MAJOR,
        "AMK_ABI_VERSION_MINOR": _MINOR,
        "AMK_MAX_INPUTS": ABI_MAX_INPUTS,
        "AMK_MAX_OUTPUTS": ABI_MAX_OUTPUTS,
        "AMK_MAX_WAITS": ABI_MAX_WAITS,
        "AMK_MAX_RANK": ABI_MAX_RANK,
        "FW_MAX_STEPS": MAX_STEPS,
        "FW_MAX_ROWS": ABI_MAX_ROWS,
        "FW_MAX_RANKS": MAX_RANKS,
        "FW_NO_TOKEN": NO_TOKEN,
        "FW_FRAGMENT_ROWS": FRAGMENT_ROWS,
        "FW_FRAGMENT_K": FRAGMENT_K,
        "FW_RESULT_REF": RESULT_REF,
        "FW_SPILLED": SPILLED,
        "FW_ABSENT": ABSENT,
        "FW_COUNTER_STRIDE": abi.COUNTER_STRIDE,
        "FW_PEERS_SHIFT": abi.PEERS_SHIFT,
        "FW_RESERVED_BYTES": RESERVED_BYTES,
        "FW_PARTIALS_BYTES": PARTIALS_BYTES,
        "FW_MIN_STAGED_BYTES": MIN_STAGED_BYTES,
        "FW_WORK_BYTES": WORK_BYTES,
        "FW_MAX_RING_SLOTS": MAX_RING_SLOTS,
        "FW_MAX_X_SCALES": MAX_X_SCALES,
        "FW_X_BLOCK": X_BLOCK,
        "FW_WARP": WARP,
        "FW_BULK_COPY_ARCH": 10 * kernels.BULK_COPY_ARCH,
        "FW_FORMAT_SHIFT": abi.FORMAT_SHIFT,
        "FW_FORMAT_MASK": abi.FORMAT_MASK,
        "FW_TAIL_SHIFT": abi.TAIL_SHIFT,
        "FW_TAIL_MASK": abi.TAIL_MASK,
        "FW_UNIT_SHIFT": abi.UNIT_SHIFT,
        "FW_UNIT_ALIGNMENT": UNIT_ALIGNMENT,
    }
)
"""Capacities, version and sizes by their C names."""

_TYPES: Final = """\
#ifdef __CUDACC_RTC__
typedef signed short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

// NVRTC can say where a member is from CUDA 13.5 on; before, a struct's size must do.
#if __CUDACC_VER_MAJOR__ > 13 || (__CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ >= 5)
#define FW_ASSERT_OFFSET(type, member, offset) \\
  static_assert(__builtin_offsetof(type, member) == offset, #type "." #member)
#else
#define FW_ASSERT_OFFSET(type, member, offset) static_assert(offset < sizeof(type), #type "." #member)
#endif

typedef int32_t amk_opcode_t;
typedef int32_t amk_dtype_t;
typedef int32_t amk_memspace_t;
typedef uint32_t amk_counter_t;
"""

_WRITTEN: Final = "// Written by `python -m flywheel.vm.abi_codegen`; change the tables there instead."


def abi_header() -> str:
    """The text of abi.h: constants, codes and structs, and assertions that the compiler lays the structs out alike."""
    parts = [_WRITTEN, "#pragma once\n", _TYPES, "\n".join(_defines())]
    parts += [_struct(name) for name in abi.STRUCTS]
    return "\n".join(parts) + "\n"


_OPAQUE: Final = 'asm volatile("" : "+r"(op));'
"""Keeps comparisons from becoming a table again."""


def dispatch_header() -> str:
    """The text of dispatch.cuh: the micro-kernels, and what calls the one of a step.

    The usual ones are found by comparison, one after the other: a table of targets lies in memory, far away.
    """
    table = sorted(kernels.KERNELS.items(), key=lambda each: each[1].define or "")
    headers = dict.fromkeys([kernel for _, kernel in table])
    includes = "\n".join(_where(kernel, f'#include "ops/{kernel.name}.cuh"') for kernel in headers)
    first = sorted([(kernel.usual, op) for op, kernel in table if kernel.usual is not None])
    usual = "\n".join(
        f"  if ({' | '.join(f'(op == AMK_OP_{op.name})' for _, op in ops)}) "
        f"return op_{kernel.name}(vm, step);\n  {_OPAQUE}"
        for kernel, ops in groupby(first, lambda each: kernels.KERNELS[each[1]])
    )
    cases = "\n".join(
        _where(kernel, f"    case AMK_OP_{op.name}: op_{kernel.name}(vm, step); break;")
        for op, kernel in table if kernel.usual is None
    )  # fmt: skip
    return f"""\
{_WRITTEN}
#pragma once

#include "abi.h"
{includes}

__device__ __forceinline__ void dispatch(Vm vm, const amk_step_t& step) {{
  int op = step.op;
{usual}
  switch (op) {{
{cases}
  }}
}}
"""


def _where(kernel: Kernel, line: str) -> str:
    """A line that only some variants have, or a plain one."""
    return line if kernel.define is None else f"#ifdef {kernel.define}\n{line}\n#endif"


def opcodes_header() -> str:
    """The text of opcodes.cuh: columns of the table of operations that kernels ask for."""
    products = " || ".join(f"(op) == AMK_OP_{op.name}" for op in kernels.KERNELS if op in PRODUCTS)
    awaiting = "\n".join(
        _where(kernel, f"    | 1u << AMK_OP_{op.name}")
        for op, kernel in kernels.KERNELS.items() if kernel.awaits
    )  # fmt: skip
    return f"""\
{_WRITTEN}
#pragma once

#include "abi.h"

// Whether matrix warps run an operation.
#define FW_IS_PRODUCT(op) ({products})

// Operations that wait for their operands themselves: a bit an opcode.
constexpr uint32_t AWAITING_OPS = 0
{awaiting}
    ;
"""


def formats_header() -> str:
    """The text of formats.cuh: the formats of streamed weights."""
    cases = "\n".join(
        f"        case {number}: return {{FW_CODE_{each.code.name}, FW_SCALES_{each.placement.name}, "
        f"AMK_DTYPE_{each.scale.name}, {each.group}, {'true' if each.zero is not None else 'false'}}};"
        for number, each in FORMATS.items()
    )
    return f"""\
{_WRITTEN}
#pragma once

#include "abi.h"

// A format of streamed weights: its codes, where their scales are and of which type, how many columns share one, and
// whether there are zero points.
struct Format {{
    int code, placement, scale, group;
    bool has_zeros;
}};

__device__ constexpr Format format_of(int number) {{
    switch (number) {{
{cases}
    }}
    return {{}};
}}
"""


FILES: Final = MappingProxyType(
    {"abi.h": abi_header, "opcodes.cuh": opcodes_header, "formats.cuh": formats_header, "dispatch.cuh": dispatch_header}
)
"""Generated files under `cuda/`."""


def drifted(folder: Path = CUDA) -> list[str]:
    """Names of the generated files in `folder` that are missing or differ from the tables."""
    return [
        name
        for name, text in FILES.items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text()
    ]


def write(folder: Path = CUDA) -> None:
    """Write the generated files."""
    for name, text in FILES.items():
        (folder / name).write_text(text(), encoding="utf-8")


def _defines() -> Iterator[str]:
    for name, value in CONSTANTS.items():
        yield f"#define {name} {value}" if value >= 0 else f"#define {name} ({value})"
    for prefix, codes in PREFIXES.items():
        for code in codes:
            yield f"#define {prefix}_{code.name} {code.value}"


def _struct(name: str) -> str:
    layout = abi.numpy_struct(name)
    assert layout.fields is not None
    members = []
    checks = [f'static_assert(sizeof({name}) == {layout.itemsize}, "{name}");']
    for field in abi.STRUCTS[name]:
        count = f"[{field.count}]" if field.count > 1 else ""
        note = f"  // {field.note}" if field.note else ""
        members.append(f"  {field.type} {field.name}{count};{note}")
        offset = layout.fields[field.name][1]
        checks.append(f"FW_ASSERT_OFFSET({name}, {field.name}, {offset});")
    return "\n".join(["", f"{'union' if name in abi.UNIONS else 'struct'} {name} {{", *members, "};", *checks])


def main(folder: Path = CUDA) -> int:
    """Write the files to `folder` or, with --check, compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    if not parser.parse_args().check:
        write(folder)
        return 0
    names = drifted(folder)
    if names:
        sys.stderr.write(f"{', '.join(names)}: not what the tables say; run python -m flywheel.vm.abi_codegen\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
