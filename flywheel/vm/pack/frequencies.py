"""Inverse frequencies of RoPE. All steps of a program with the same rotation share one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flywheel.ir.operations import SCALED_ROPE

Floats = npt.NDArray[np.float32]


class Frequencies:
    """Tables of inverse frequencies, one after the other."""

    __slots__ = ("_offsets", "_size", "_tables")

    def __init__(self) -> None:
        self._offsets: dict[tuple[object, ...], int] = {}
        self._tables: list[Floats] = []
        self._size = 0

    def offset(self, params: Mapping[str, Any]) -> int:
        """The place where a ROPE step's frequencies begin."""
        if "frequencies" in params:
            numbers: tuple[float, ...] = params["frequencies"]
            return self._offset(numbers, lambda: np.array(numbers, np.float32))
        given = tuple(float(params[name]) for name in SCALED_ROPE if name in params)
        key = (int(params["head_dim"]), float(params["theta"]), given)
        return self._offset(key, lambda: inverse_frequencies(*key))

    def _offset(self, key: tuple[object, ...], make: Callable[[], Floats]) -> int:
        if key not in self._offsets:
            table = make()
            self._offsets[key] = self._size
            self._tables.append(table)
            self._size += len(table)
        return self._offsets[key]

    def table(self) -> Floats:
        """All tables."""
        return np.concatenate([np.zeros(0, np.float32), *self._tables])


def inverse_frequencies(head_dim: int, theta: float, scaling: tuple[float, ...]) -> Floats:
    """Radians per position of each pair, [head_dim / 2] in fp32. `scaling` is empty or (factor, low, high, original).

    Source: vm/reference/attention.py, operation by operation.
    """
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    # Powers in fp64, rounded, nearly always equal torch's fp32 powers bit by bit. Numpy's fp32 powers often do not.
    powers = (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)
    plain: Floats = np.float32(1.0) / powers
    if not scaling:
        return plain
    factor, low, high, original = (np.float32(value) for value in scaling)
    # torch divides a number by a tensor by multiplying with reciprocals.
    wavelengths = 1 / plain * np.float32(2 * math.pi)
    blend = (1 / wavelengths * original - low) / (high - low) if high != low else np.zeros_like(plain)
    between = (1 - blend) * plain / factor + blend * plain
    scaled = np.where(wavelengths > original / low, plain / factor, between)
    return np.where(wavelengths < original / high, plain, scaled).astype(np.float32)
