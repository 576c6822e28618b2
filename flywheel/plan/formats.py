"""The stream formats of quantised matrices that have kernels, and their units.

A unit is 16 rows x UNIT_K columns of codes with their scales. Source: docs/vm.md, "Quantised weights".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import InvalidProgramError
from flywheel.ir import DType

UNIT_ROWS: Final = 16

GROUP_K: Final = 128
"""Columns of a unit that share a scale, in formats that say nothing else."""

UNIT_GROUPS: Final = 8
"""Groups of so many columns in a unit."""

UNIT_K: Final = UNIT_GROUPS * GROUP_K
"""Columns of a unit. Slices of a coded product are multiples of it."""

UNIT_ALIGNMENT: Final = 32
"""The size of a unit is a multiple of this number of bytes."""

_ZERO_BYTES: Final = 2
"""A unit has each zero point as an integer of 16 bits."""


class Code(IntEnum):
    """Type of a matrix's codes."""

    I8 = 1
    F8 = 2
    I4 = 3


class ScalePlacement(IntEnum):
    """Where a matrix's scales are, and what each of them is for."""

    ROWS = 0
    """Applied to the product, one for each row. These scales are not in the stream."""
    GROUPS = 1
    """In the unit, one for each row and group."""
    BLOCKS = 2
    """In the unit, one for each group and 16 rows."""


CODES: Final[Mapping[Code, DType]] = {Code.I8: DType.I8, Code.F8: DType.F8E4M3, Code.I4: DType.I4}


@dataclass(frozen=True, slots=True)
class Coding:
    """A format of streamed weights. The kernel knows it by `number`. `scale` is the type of scales in the stream, or
    behind the product. `group` columns of a unit share one. `zero` is the type of the zero points that a program has,
    or None."""

    number: int
    code: Code
    placement: ScalePlacement
    scale: DType
    zero: DType | None = None
    group: int = GROUP_K

    @property
    def code_bytes(self) -> int:
        """Bytes of a unit's codes."""
        return CODES[self.code].nbytes(UNIT_ROWS * UNIT_K)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        nbytes, groups = self.code_bytes, UNIT_K // self.group
        if self.placement is not ScalePlacement.ROWS:
            nbytes += self.scale.nbytes(groups * (UNIT_ROWS if self.placement is ScalePlacement.GROUPS else 1))
        return nbytes if self.zero is None else nbytes + groups * UNIT_ROWS * _ZERO_BYTES

    def fits(
        self, scales: tuple[DType, tuple[int, ...]], zeros: DType | None, group: int, shared: int, depth: int
    ) -> bool:
        """Whether it is the format of a matrix of rows of `depth` codes, of which `group`, and `shared` rows, share
        scales of this type and shape."""
        dtype, shape = scales
        if self.placement is ScalePlacement.ROWS:
            return group == depth and zeros is None
        if zeros is not self.zero or group % self.group or shape[-1] * group != depth:
            return False
        if self.placement is ScalePlacement.BLOCKS:
            return shared > 1 and shared % UNIT_ROWS == 0
        return shared == 1 and dtype is self.scale


_I8, _F8, _I4 = Code
_ROWS, _GROUPS, _BLOCKS = ScalePlacement
_F32, _F16, _BF16, _ZEROS = DType.F32, DType.F16, DType.BF16, DType.I8

_TABLE: Final = (
    Coding(1, _I8, _ROWS, _F32),
    Coding(5, _I8, _GROUPS, _BF16),
    Coding(21, _I8, _GROUPS, _BF16, _ZEROS),
    Coding(9, _I8, _GROUPS, _F16),
    Coding(25, _I8, _GROUPS, _F16, _ZEROS),
    Coding(13, _I8, _BLOCKS, _F32),
    Coding(2, _F8, _ROWS, _F32),
    Coding(6, _F8, _GROUPS, _BF16),
    Coding(10, _F8, _GROUPS, _F16),
    Coding(14, _F8, _BLOCKS, _F32),
    Coding(3, _I4, _ROWS, _F32),
    Coding(7, _I4, _GROUPS, _BF16),
    Coding(23, _I4, _GROUPS, _BF16, _ZEROS),
    Coding(11, _I4, _GROUPS, _F16),
    Coding(27, _I4, _GROUPS, _F16, _ZEROS),
)

FORMATS: Final[Mapping[int, Coding]] = MappingProxyType({coding.number: coding for coding in _TABLE})
"""The formats that there are kernels for, by number. 0 means a matrix of the program's own type. Bundles have these
numbers: never renumber."""


def coding_numbered(number: int) -> Coding:
    """The format with the kernel's number. Raises ValueError for an unknown number."""
    if number not in FORMATS:
        raise ValueError(f"coding: {number} is no format of streamed weights")
    return FORMATS[number]


def in_order(codings: Collection[Coding]) -> tuple[Coding, ...]:
    """The formats in the order of FORMATS."""
    return tuple([each for each in _TABLE if each in codings])


def coding_of(
    q: DType, scales: tuple[DType, tuple[int, ...]], zeros: DType | None, params: Mapping[str, Any], depth: int
) -> Coding:
    """The format of a matrix `q` [rows, depth] with scales of this type and shape and a DEQUANT step's `params`.

    Raises InvalidProgramError where there is no kernel for it.
    """
    group, shared = int(params["group"]), int(params.get("rows_per_scale", 1))
    own = [each for each in _TABLE if CODES[each.code] is q]
    if not own:
        raise InvalidProgramError(f"DEQUANT of {q.name} has no kernel for a product")
    found = [each for each in own if depth % each.group == 0 and each.fits(scales, zeros, group, shared, depth)]
    if found:
        return found[0]
    least, (dtype, shape) = min([each.group for each in own]), scales
    if depth % least:
        raise InvalidProgramError(f"DEQUANT of rows of {depth} columns, not a multiple of {least}, has no kernel")
    if group % least or shape[-1] * group != depth:
        raise InvalidProgramError(f"DEQUANT by groups of {group}, not a multiple of {least}, has no kernel")
    if shared > 1:
        raise InvalidProgramError(f"DEQUANT of {q.name} by blocks of {shared} x {group} has no kernel")
    raise InvalidProgramError(
        f"DEQUANT of {q.name} by groups of {group} with {dtype.name} scales"
        f"{'' if zeros is None else f' and {zeros.name} zero points'} has no kernel"
    )


def slot_bytes(chunk_bytes: int, codings: Iterable[Coding]) -> int:
    """Bytes of a ring slot. It has room for `chunk_bytes` of codes, or for one unit, and for their scales."""
    units = (max(1, chunk_bytes // coding.code_bytes) * coding.unit_bytes for coding in codings)
    return max([chunk_bytes, *(-(-each // GROUP_K) * GROUP_K for each in units)])


def coded_bytes(coding: Coding, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix [rows, columns], padded to whole units."""
    rows, columns = prod(shape[:-1]), shape[-1]
    return -(-rows // UNIT_ROWS) * -(-columns // UNIT_K) * coding.unit_bytes
