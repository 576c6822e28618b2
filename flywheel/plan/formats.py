"""The stream formats of quantised matrices that have kernels, and their units.

A unit is 16 rows x UNIT_K columns of codes with their scales. Source: docs/vm.md, "Quantised weights".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, Final

from flywheel.errors import InvalidProgramError
from flywheel.ir import DType

UNIT_ROWS: Final = 16

GROUP_K: Final = 128
"""Columns of a unit that share a scale."""

UNIT_GROUPS: Final = 8

UNIT_K: Final = UNIT_GROUPS * GROUP_K
"""Columns of a unit. Slices of a coded product are multiples of it."""

UNIT_ALIGNMENT: Final = 32
"""The size of a unit is a multiple of this number of bytes."""

_GROUP_PART: Final = UNIT_ROWS * UNIT_GROUPS * 2
"""Bytes of a unit's scales, which have a half for each row and group. Zero points take as many."""

_BLOCK_PART: Final = UNIT_GROUPS * 4
"""Bytes of a unit's block scales, which have a float for each group."""


class Code(IntEnum):
    """Type of a matrix's codes."""

    I8 = 1
    F8 = 2
    I4 = 3


class Scales(IntEnum):
    """Kind and place of a product's scales."""

    ROWS = 0
    """One F32 for each row, applied to the product. These scales are not in the stream."""
    BF16 = 1
    F16 = 2
    """One F16 for each row and group, in the unit."""
    BLOCKS = 3
    """One F32 for each group and 16 rows, in the unit."""


CODES: Final[Mapping[DType, Code]] = {DType.I8: Code.I8, DType.F8E4M3: Code.F8, DType.I4: Code.I4}


@dataclass(frozen=True, slots=True, order=True)
class Coding:
    """A format of streamed weights. The kernel knows it by `number`."""

    code: Code
    scales: Scales
    zeros: bool = False

    @property
    def number(self) -> int:
        """The kernel's number of the format, from 1 on. 0 means a matrix of the program's own type."""
        return self.code | self.scales << 2 | self.zeros << 4

    @property
    def code_bytes(self) -> int:
        """Bytes of a unit's codes."""
        return UNIT_ROWS * UNIT_K // (2 if self.code is Code.I4 else 1)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        scales = {Scales.ROWS: 0, Scales.BLOCKS: _BLOCK_PART}.get(self.scales, _GROUP_PART)
        return self.code_bytes + scales + (_GROUP_PART if self.zeros else 0)


def coding_numbered(number: int) -> Coding:
    """The format with the kernel's number. Raises ValueError for an unknown number."""
    found = Coding(Code(number & 3), Scales(number >> 2 & 3), bool(number >> 4 & 1))
    if found.number != number:
        raise ValueError(f"coding: {number} is no format of streamed weights")
    return found


def coding_of(
    q: DType, scales: tuple[DType, tuple[int, ...]], zeros: DType | None, params: Mapping[str, Any], depth: int
) -> Coding:
    """The format of a matrix `q` [rows, depth] with scales of this type and shape and a DEQUANT step's `params`.

    Raises InvalidProgramError where there is no kernel for it.
    """
    group, shared = int(params["group"]), int(params.get("rows_per_scale", 1))
    if q not in CODES:
        raise InvalidProgramError(f"DEQUANT of {q.name} has no kernel for a product")
    if depth % GROUP_K:
        raise InvalidProgramError(f"DEQUANT of rows of {depth} columns, not a multiple of {GROUP_K}, has no kernel")
    code, (dtype, shape) = CODES[q], scales
    if group == depth and zeros is None:
        return Coding(code, Scales.ROWS)
    if group % GROUP_K or shape[-1] * group != depth:
        raise InvalidProgramError(f"DEQUANT by groups of {group}, not a multiple of {GROUP_K}, has no kernel")
    if shared > 1:
        if shared % UNIT_ROWS or zeros is not None or code is Code.I4:
            raise InvalidProgramError(f"DEQUANT of {q.name} by blocks of {shared} x {group} has no kernel")
        return Coding(code, Scales.BLOCKS)
    halves = {DType.BF16: Scales.BF16, DType.F16: Scales.F16}
    if dtype not in halves or zeros not in (None, DType.I8) or (zeros is not None and code is Code.F8):
        raise InvalidProgramError(
            f"DEQUANT of {q.name} by groups of {group} with {dtype.name} scales"
            f"{'' if zeros is None else f' and {zeros.name} zero points'} has no kernel"
        )
    return Coding(code, halves[dtype], zeros is not None)


def slot_bytes(chunk_bytes: int, codings: Iterable[Coding]) -> int:
    """Bytes of a ring slot. It has room for `chunk_bytes` of codes, or for one unit, and for their scales."""
    units = (max(1, chunk_bytes // coding.code_bytes) * coding.unit_bytes for coding in codings)
    return max([chunk_bytes, *(-(-each // GROUP_K) * GROUP_K for each in units)])


def coded_bytes(coding: Coding, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix [rows, columns], padded to whole units."""
    rows, columns = prod(shape[:-1]), shape[-1]
    return -(-rows // UNIT_ROWS) * -(-columns // UNIT_K) * coding.unit_bytes
