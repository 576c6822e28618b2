"""Element types, memory spaces and buffer kinds, with their canonical codes. Source: docs/ir.md."""

from __future__ import annotations

from enum import IntEnum
from struct import pack, unpack
from typing import Final


class DType(IntEnum):
    """Element type of a buffer."""

    F32 = 0
    F16 = 1
    BF16 = 2
    F8E4M3 = 3
    F8E5M2 = 4
    I32 = 5
    I8 = 6
    I4 = 7
    U8 = 8
    BOOL = 9

    __hash__ = int.__hash__  # members are keys in hot loops; Enum's own hash is Python code

    @property
    def bits(self) -> int:
        """Bits of one element. Two I4 share a byte."""
        return _BITS[self]

    def nbytes(self, count: int) -> int:
        """Bytes of `count` elements, rounded up to a whole byte."""
        return (count * _BITS[self] + 7) // 8

    def rounded(self, value: float) -> float:
        """The nearest F32, F16 or BF16 of a value that is in its range; of two, the even one."""
        if self is DType.F16:
            return float(unpack("<e", pack("<e", value))[0])
        (word,) = unpack("<I", pack("<f", value))
        if self is DType.BF16:
            word = word + 0x7FFF + (word >> 16 & 1) & 0xFFFF0000
        return float(unpack("<f", pack("<I", word))[0])


_BITS: Final = (32, 16, 16, 8, 8, 32, 8, 4, 8, 8)

COMPUTE_DTYPES: Final = (DType.F32, DType.F16, DType.BF16)
"""Element types that steps compute in."""


class MemSpace(IntEnum):
    """Where a buffer or page lives."""

    HBM = 0
    GLOBAL_SCRATCH = 1
    SMEM = 2
    REGISTER = 3

    __hash__ = int.__hash__


class BufferKind(IntEnum):
    """What a buffer is for."""

    WEIGHT = 0
    ACTIVATION = 1
    KV_CACHE = 2
    IO_INPUT = 3
    IO_OUTPUT = 4
    CONST = 5

    __hash__ = int.__hash__


READONLY_KINDS: Final = frozenset({BufferKind.WEIGHT, BufferKind.CONST, BufferKind.IO_INPUT})
"""Kinds that no task may write, and that need no producer to be read."""

PER_SM_SPACES: Final = frozenset({MemSpace.SMEM, MemSpace.REGISTER})
"""Spaces that only tasks of one SM can access."""
