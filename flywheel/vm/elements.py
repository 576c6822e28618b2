"""Elements of buffers as numpy holds them. BF16, which numpy lacks, travels as its bits and is widened to float32."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import TensorError
from flywheel.ir import DType

STORED: Final[Mapping[DType, np.dtype[Any]]] = MappingProxyType(
    {
        DType.F32: np.dtype(np.float32),
        DType.F16: np.dtype(np.float16),
        DType.BF16: np.dtype(np.uint16),
        DType.I32: np.dtype(np.int32),
        DType.I8: np.dtype(np.int8),
        DType.U8: np.dtype(np.uint8),
        DType.BOOL: np.dtype(np.bool_),
    }
)
"""The numpy type whose bytes a buffer's are; BF16's are its bits."""


def stored_type(dtype: DType) -> np.dtype[Any]:
    """Of STORED. Raises TensorError for a dtype that numpy cannot hold."""
    if dtype not in STORED:
        raise TensorError(f"dtype {dtype.name}: numpy holds only {', '.join(kind.name for kind in STORED)}")
    return STORED[dtype]


def stored(array: npt.NDArray[Any], dtype: DType, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """`array` as the bytes of a `dtype` buffer of `shape`: unchanged, or float32 rounded to BF16.

    What numpy has no type for comes as its bytes, in uint8 of any shape. Raises TensorError, which calls the array
    `name`, where its type or shape is another.
    """
    if dtype not in STORED:
        if array.dtype != np.uint8 or array.nbytes != dtype.nbytes(prod(shape)):
            raise TensorError(
                f"{name}: {array.nbytes} bytes of {array.dtype} are not the {dtype.nbytes(prod(shape))} of uint8 "
                f"that hold {dtype.name} {list(shape)}"
            )
        return array
    if array.shape != shape:
        raise TensorError(f"{name}: shape {list(array.shape)} is not the buffer's {list(shape)}")
    if dtype is DType.BF16 and array.dtype == np.float32:
        return bf16_bits(array)
    if array.dtype != stored_type(dtype):
        raise TensorError(f"{name}: {array.dtype} is not {stored_type(dtype)}, as {dtype.name} is stored")
    return array


def values(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """What the stored bytes mean: float32 for BF16, the array itself for others."""
    if dtype is not DType.BF16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def bf16_bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Float32 rounded to the nearest BF16, ties to the even one; a NaN stays one."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16)
