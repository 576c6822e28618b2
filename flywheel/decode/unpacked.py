"""Quantised matrices of a checkpoint without torch: finds their tensors in its files, and returns codes, scales and
zero points as kernels take them. `models.unpacking` does the same with torch, for more layouts."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from flywheel.decode.stored import Stored
from flywheel.errors import WeightsError
from flywheel.ir import Buffer, DType
from flywheel.models.graph import codes_of, scales_of, zeros_of

Part = Literal["codes", "scales", "zeros"]
"""A part of a quantised matrix."""

Array = npt.NDArray[Any]

_WEIGHT: Final = "weight"
_PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {codes_of(""): "codes", scales_of(""): "scales", zeros_of(""): "zeros"}
)
_ENDS: Final[Mapping[str, Mapping[Part, str]]] = MappingProxyType(
    {
        "plain": {"codes": "weight", "scales": "weight_scale", "zeros": "weight_zero_point"},
        "inverse": {"codes": "weight", "scales": "weight_scale_inv"},
        "packed": {"codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point"},
    }
)
LAYOUTS: Final = tuple(_ENDS)
"""The layouts of `models.schemes.Layout` that are supported here: compressed-tensors' and blocks of fp8."""


def part_of(name: str) -> Part | None:
    """The part of a quantised matrix that a state-dict name stands for; None for a weight that is not quantised."""
    return next((part for end, part in _PARTS.items() if name.endswith(f"{_WEIGHT}{end}")), None)


def stored_name(name: str, layout: str) -> str:
    """The name of a state dict's tensor in a checkpoint's files."""
    part = part_of(name)
    if part is None:
        return name
    return name.rpartition(_WEIGHT)[0] + _ENDS[layout][part]


def elements(stored: Stored, buffer: Buffer, part: Part, layout: str) -> Array:
    """A part of a quantised matrix in the form of `vm.elements.stored`. Raises WeightsError for a wrong size."""
    words = layout == "packed" and part != "scales"
    held = 8 * stored.data.size if words else prod(stored.shape)
    wanted = prod(buffer.shape) * ((4 if buffer.dtype is DType.I4 else 8) if words else 1)
    packed_zeros = words and part == "zeros"  # of numbers of 4 or 8 bits
    if held != wanted and not (packed_zeros and 2 * held == wanted):
        raise WeightsError(f"{buffer.name}: {list(stored.shape)} of {stored.dtype.name} are not {list(buffer.shape)}")
    if part == "scales":
        return stored.elements(buffer.dtype).reshape(buffer.shape)
    if layout != "packed":
        return stored.data if buffer.dtype is DType.F8E4M3 else stored.data.view(np.int8).reshape(buffer.shape)
    if part == "codes":  # words of unsigned numbers of a row, lowest bits first
        if buffer.dtype is DType.I4:
            return stored.data ^ np.uint8(0x88)
        return (stored.data ^ np.uint8(0x80)).view(np.int8).reshape(buffer.shape)
    return _zeros(stored, buffer)


def _zeros(stored: Stored, buffer: Buffer) -> Array:
    """Zero points [rows, groups], from words [rows / numbers per word, groups] that each hold consecutive rows of a
    column."""
    words = np.ascontiguousarray(stored.data.view(np.int32).reshape(stored.shape).T)
    octets = words.view(np.uint8)
    bits = 8 * octets.size // int(np.prod(buffer.shape))
    if bits == 4:
        octets = np.stack((octets & 15, octets >> 4), -1).reshape(len(octets), -1)
    return np.ascontiguousarray((octets.astype(np.int16) - (1 << bits - 1)).astype(np.int8).T)
