"""Products with a rival's matrices: whole ones, quantised codes with scales, torch's int4 tiles, and a Triton kernel's
words, and layers of a package.

These are the common ways to multiply quantised weights in PyTorch: a compiler that dequantises inside the product,
`torch.ops.aten._weight_int4pack_mm`, known as tinygemm, a kernel of one's own (`triton_product`), and a package of
kernels (`humming_product`).

Source: meta-pytorch/gpt-fast, `quantize.py`; pytorch/ao, `quant_primitives.py`; pytorch/pytorch,
`aten/src/ATen/native/cuda/int4mm.cu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

from flywheel.models.formats import BLOCK
from flywheel.models.quantise import dequantise, rows_per_scale, unpack

_OFFSET: Final = 8
"""Offset that tinygemm subtracts from each number of 0..15."""

_TILE: Final = 16
"""Columns of a tinygemm tile. Up to _TILES tiles are stored together."""

_TILES: Final = 8


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix [N, K] as `models.quantise` stores it: codes, scales and zero points."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


@dataclass(frozen=True, slots=True)
class Tiled:
    """An int4 matrix [N, K] in tinygemm's layout: `tiles` in its own order, and `scales` [K / group, N, 2], bfloat16: a
    scale and an offset for each group of columns."""

    tiles: Tensor
    scales: Tensor
    group: int


@dataclass(frozen=True, slots=True)
class Words:
    """An int4 matrix [N, K] in the layout of `triton_product`: `words` int32 [ceil(N / 8), ceil(K / 512), 4, 8, 16];
    `scales`, and `zeros` if there are any, [4 ceil(K / 512), N], zero beyond K."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None


@dataclass(frozen=True, slots=True)
class Layered:
    """An int4 matrix in the layout of a package that also multiplies by it: `product` of x [rows, K] is [rows, N].
    `parts` are the tensors that it reads."""

    product: Callable[[Tensor], Tensor]
    parts: tuple[Tensor, ...]


Matrix: TypeAlias = Tensor | Coded | Tiled | Words | Layered


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """x [rows, K] times the transpose of a matrix [N, K] -> [rows, N], in x's dtype."""
    if isinstance(matrix, Coded):
        return _multiply_coded(x, matrix)
    if isinstance(matrix, Tiled):
        ours = torch.ops.aten
        own = ours._weight_int4pack_mm if x.is_cuda else ours._weight_int4pack_mm_for_cpu
        made: Tensor = own(x, matrix.tiles, matrix.group, matrix.scales)
        return made
    if isinstance(matrix, Words):
        made = torch.ops.flywheel.multiply_words(x, matrix.words, matrix.scales, matrix.zeros)
        return made
    if isinstance(matrix, Layered):
        return matrix.product(x)
    return linear(x, matrix)


def parts_of(matrix: Matrix) -> tuple[Tensor, ...]:
    """The tensors of which a product reads every byte."""
    if isinstance(matrix, Tensor):
        return (matrix,)
    if isinstance(matrix, Tiled):
        return matrix.tiles, matrix.scales
    if isinstance(matrix, Layered):
        return matrix.parts
    codes = matrix.words if isinstance(matrix, Words) else matrix.codes
    return (codes, matrix.scales) if matrix.zeros is None else (codes, matrix.scales, matrix.zeros)


def _multiply_coded(x: Tensor, matrix: Coded) -> Tensor:
    """Scales of whole rows and of the whole matrix are applied to the product. Other scales are applied to the weights,
    rounded to x's dtype. In float16 all scales are applied to the weights, since sums of unscaled codes overflow."""
    of_weights = matrix.zeros is not None or matrix.scales.shape[1] > 1 or x.dtype == torch.float16
    if of_weights or len(matrix.scales) not in (1, len(matrix.codes)):
        return linear(x, dequantise(matrix.codes, matrix.scales, matrix.zeros).to(x.dtype))
    return (linear(x, matrix.codes.to(x.dtype)) * matrix.scales.view(1, -1)).to(x.dtype)


def join(parts: Sequence[Coded]) -> Coded:
    """Stack matrices with the same columns, codes and groups vertically. A single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    blocks = all(rows_per_scale(len(part.codes), len(part.scales)) == BLOCK for part in parts)
    apart = not blocks or any(len(part.codes) % BLOCK for part in parts)
    scales = [_by_rows(part.scales, len(part.codes)) if apart else part.scales for part in parts]
    zeros = [part.zeros if part.zeros is None or not apart else _by_rows(part.zeros, len(part.codes)) for part in parts]
    given = [each for each in zeros if each is not None]
    return Coded(torch.cat([part.codes for part in parts]), torch.cat(scales), torch.cat(given) if given else None)


def _by_rows(each: Tensor, rows: int) -> Tensor:
    """Scales or zero points expanded to one row per matrix row."""
    return each.repeat_interleave(rows_per_scale(rows, len(each)), 0)[:rows]


def tile(matrix: Coded) -> Tiled:
    """Pack 4-bit numbers [N, K / 2], with bfloat16 scales for groups of a row, into tinygemm's tiles on their device.

    Zero points are exact except for the rounding of zero point times scale, which tinygemm adds.
    """
    raised = matrix.codes ^ (_OFFSET | _OFFSET << 4)
    width = 2 * raised.shape[1]
    together = gcd(width // _TILE, _TILES)
    if raised.is_cuda:
        # tinygemm stores the first of two numbers in the high half.
        tiles = torch.ops.aten._convert_weight_to_int4pack((raised & 15) << 4 | raised >> 4, together)
    else:
        numbers = unpack(matrix.codes).int() + _OFFSET
        tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, together)
    zeros = torch.zeros_like(matrix.scales) if matrix.zeros is None else -matrix.zeros.to(matrix.scales) * matrix.scales
    scales = torch.stack((matrix.scales, zeros), -1).transpose(0, 1).contiguous()
    return Tiled(tiles, scales, width // matrix.scales.shape[1])
