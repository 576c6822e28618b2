"""Random weights of a quantised model, made so that each scale and zero point counts.

Weights that are all alike would have equal scales, and a program that takes its neighbour's scale would be nearly
right.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

import torch
from torch import Tensor

from flywheel.ir import DType
from flywheel.models.formats import WeightFormat, WeightFormats
from flywheel.models.quantise import keeping, rows_per_scale
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import draw_uniform, random_weights
from flywheel.tensors import TORCH_DTYPES

_SPREAD: Final = 0.3
"""Deviation of the factors, one for the elements that share a scale. They are within 0.48 and 1.52."""

_OFFSET: Final = 0.4
"""Deviation of the offsets, one for the elements that share a zero point, relative to that of the weights."""


def random_quantised(
    spec: DecoderSpec, seed: int, formats: WeightFormats, dtype: DType, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """`random_weights` of a seed, stored in `formats` by `models.quantise`.

    Elements that share a scale are first multiplied by a factor of their own and, where there are zero points, shifted.
    Raises as `keeping` and the function that it returns.
    """

    def varied(key: str, matrix: Tensor, format: WeightFormat) -> Tensor:
        rows, groups = shape = format.scale_shape((matrix.shape[0], matrix.shape[1]))

        def of_rows(what: str, mean: float, deviation: float) -> Tensor:
            drawn = draw_uniform(f"{seed}:{key}.{what}", shape, mean, deviation, matrix.dtype, device)
            return drawn.repeat_interleave(rows_per_scale(matrix.shape[0], rows), 0)[: matrix.shape[0], :, None]

        parts = matrix.view(matrix.shape[0], groups, -1) * of_rows("factors", 1.0, _SPREAD)
        if format.zeros:
            deviation = float(matrix.abs().max()) / sqrt(3.0)  # the largest is the same on every device, as no sum is
            parts += of_rows("added", 0.0, _OFFSET * deviation)
        return parts.view(matrix.shape)

    return random_weights(spec, seed, TORCH_DTYPES[dtype], device, keeping(spec, formats, dtype, first=varied))
