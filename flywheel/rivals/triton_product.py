"""A product with an int4 matrix as a Triton kernel, for one to eight rows.

Import it only where triton is installed. A matrix [N, K] is packed once. A block of 8 rows and 512 columns is 512 words
of 32 bits, in the order in which tensor cores take their first operand (`mma.m16n8k16`), so that a thread loads 16
bytes that it multiplies itself. A word has two neighbours of each of 4 groups. By one AND and OR they become two
halves: 0x4300 and 0x6400 are 128 and 1024 in bfloat16 and float16, and the bits of a number add it. A product with ones
tells what these offsets, and zero points, add. Each warp multiplies columns of its own.

Source: IST-DASLab/marlin, `marlin_cuda_kernel.cu` (layout, numbers as bits of halves); NVIDIA PTX ISA, "Matrix
Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.errors import TritonError

from flywheel.errors import KernelCompileError
from flywheel.models.quantise import unpack
from flywheel.rivals.lineup import WORDS_GROUP
from flywheel.rivals.products import Coded, Words

ROWS: Final = 8
"""The most rows of a product's first operand, and the rows of a block of the matrix."""

_COLUMNS: Final = 512
"""Columns of a block."""

_AT_ONCE: Final = 2**25
"""Numbers that are packed at a time."""

_MAGIC: Final = {torch.bfloat16: (0x43004300, 128 + 8), torch.float16: (0x64006400, 1024 + 8)}
"""For each half type: the bits that make two of them of two numbers, and what is then added to a code."""

CONFIGS: Final = tuple(
    triton.Config({"BLOCKS": blocks, "WARPS": warps}, num_warps=warps, num_stages=stages)
    for blocks, warps, stages in (
        (2, 4, 1), (2, 4, 2), (2, 4, 3), (2, 8, 1), (2, 8, 2), (4, 4, 1), (4, 4, 2), (4, 8, 1),
    )
)  # fmt: skip
"""What is tried for each shape: blocks of 8 rows and warps of a program, and stages of the loads."""


def pack_words(matrix: Coded) -> Words:
    """Pack 4-bit numbers [N, K / 2], with scales and zero points [N, K / group] of groups of a multiple of 128 columns.

    It packs some rows at a time, since numbers take many times as much memory as words.
    """
    codes = matrix.codes
    height, width = len(codes), 2 * codes.shape[1]
    words = torch.empty(
        (-(-height // ROWS), -(-width // _COLUMNS), 4, ROWS, 16), dtype=torch.int32, device=codes.device
    )
    taken = ROWS * max(1, _AT_ONCE // (ROWS * width))
    for start in range(0, height, taken):
        numbers = unpack(codes[start : start + taken]) + 8
        numbers = pad(numbers, (0, -width % _COLUMNS, 0, -len(numbers) % ROWS))
        words[start // ROWS : (start + taken) // ROWS] = _words(numbers)

    def by_group(each: Tensor) -> Tensor:
        repeated = each.repeat_interleave(width // WORDS_GROUP // each.shape[1], 1)
        return pad(repeated, (0, 4 * words.shape[1] - repeated.shape[1])).T.contiguous()

    return Words(words, by_group(matrix.scales), None if matrix.zeros is None else by_group(matrix.zeros))


def _words(numbers: Tensor) -> Tensor:
    """The words of numbers 0..15 [8 n, 512 m] -> [n, m, 4, 8, 16].

    Of column 32 s + 16 h + 4 q + 2 e of group i, and of the next, the numbers are in part s, word 4 q + 2 h + e: the
    numbers i and i + 4 of its eight.
    """
    height, width = numbers.shape
    apart = numbers.view(height // ROWS, ROWS, width // _COLUMNS, 4, 4, 2, 4, 2, 2)
    #                    n            r    m                  i  s  h  q  e  half
    placed = apart.permute(0, 2, 4, 1, 6, 5, 7, 8, 3).reshape(height // ROWS, width // _COLUMNS, 4, ROWS, 16, 8)
    made = torch.zeros(placed.shape[:-1], dtype=torch.int32, device=numbers.device)
    for place in range(8):
        made |= placed[..., place].int() << 4 * place
    return made


@torch.library.custom_op("flywheel::multiply_words", mutates_args=(), device_types="cuda")
def multiply_words(x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """x [1..8, K] in a half type times the transpose of a matrix in the layout of `Words` -> [rows, N]. The first
    product of a shape times CONFIGS, so it must not be captured. Raises KernelCompileError."""
    try:
        return launch(_product, x, Words(words, scales, zeros), {})
    except TritonError as error:
        raise KernelCompileError(f"Triton: {str(error).strip().partition(chr(10))[0]}") from error


@multiply_words.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    return x.new_empty((len(x), scales.shape[1]))


def launch(kernel: Any, x: Tensor, matrix: Words, config: dict[str, Any]) -> Tensor:
    """The product by one of this module's kernels, with one of CONFIGS unless the kernel itself chooses one."""
    rows, width = x.shape
    height = matrix.scales.shape[1]
    made = x.new_empty((rows, height))
    magic, offset = _MAGIC[x.dtype]

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(height, ROWS * meta["BLOCKS"]),)

    kernel[grid](
        x.contiguous(), matrix.words, matrix.scales, matrix.scales if matrix.zeros is None else matrix.zeros, made,
        magic, height, width, ROWS_OF_X=rows, HAS_ZEROS=matrix.zeros is not None, OFFSET=offset, **config,
    )  # fmt: skip
    return made


def chosen_configs(rows: int) -> tuple[str, ...]:
    """What was chosen so far for each matrix that was multiplied by this many rows."""
    return tuple(
        f"{height} x {width} by {ROWS * config.kwargs['BLOCKS']} rows, {config.num_warps} warps, "
        f"{config.num_stages} stages"
        for (height, width, rows_of_x, *_), config in _product.cache.items()
        if rows_of_x == rows
    )


@triton.jit(do_not_specialize=["magic"])  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, words_ptr, scales_ptr, zeros_ptr, made_ptr, magic, height, width,
    ROWS_OF_X: tl.constexpr, HAS_ZEROS: tl.constexpr, OFFSET: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """A program computes 8 BLOCKS columns of the result. Its warps take turns with blocks of 512 columns of the matrix.

    `magic` is an argument, so that AND and OR with two constants are one instruction.
    """
    TALL: tl.constexpr = 8 * BLOCKS
    dtype = x_ptr.dtype.element_ty
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    known = tl.minimum(row, height - 1)
    n_wide = (width + 511) // 512
    warp = tl.arange(0, WARPS)
    # [block, part, warp]: a load gives each warp the parts of its own place, and a lane 4 of their 128 words.
    part_of = tl.arange(0, BLOCKS * 4 * WARPS)
    own = part_of % WARPS
    block = tl.minimum(tl.program_id(0) * BLOCKS + part_of // (4 * WARPS), (height - 1) // 8)
    start = (block.to(tl.int64) * n_wide + own) * 512 + part_of // WARPS % 4 * 128
    words_at = words_ptr + start[:, None] + tl.arange(0, 128)[None, :]
    column = warp[:, None, None] * 512 + tl.arange(0, 128)[None, :, None]
    row_of_x = tl.arange(0, 8)[None, None, :]
    one = tl.full((WARPS, TALL, 64), 1.0, tl.float32).to(dtype)
    ones = tl.reshape(tl.join(one, one), (WARPS, TALL, 128))  # so that it has the layout of the numbers
    sums = tl.zeros((WARPS, TALL, 8), tl.float32)
    for first in tl.range(0, n_wide, WARPS):
        live = first + warp < n_wide
        loaded = tl.load(words_at + first * 512, mask=(first + own < n_wide)[:, None], other=0)
        parted = tl.reshape(loaded, (BLOCKS // 2, 2, 4, WARPS, 8, 4, 2, 2))
        words = tl.reshape(tl.permute(parted, (3, 0, 1, 4, 2, 6, 5, 7)), (WARPS, TALL, 64))
        for i in tl.static_range(4):  # a group each
            pair = ((words >> (4 * i)) & 0x000F000F) | magic
            low = pair.to(tl.int16).to(dtype, bitcast=True)
            high = (pair >> 16).to(tl.int16).to(dtype, bitcast=True)
            both = tl.reshape(tl.join(low, high), (WARPS, TALL, 128))
            at = column + (first * 512 + i * 128)
            x = tl.load(x_ptr + row_of_x * width + at, mask=(row_of_x < ROWS_OF_X) & (at < width), other=0.0)
            part = tl.dot(both, x)
            total = tl.dot(ones, x)
            at_group = ((first + warp) * 4 + i)[:, None].to(tl.int64) * height + known[None, :]
            scale = tl.load(scales_ptr + at_group, mask=live[:, None], other=0.0).to(tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + at_group, mask=live[:, None], other=0).to(tl.float32)
                sums += (part - (zero + OFFSET)[:, :, None] * total) * scale[:, :, None]
            else:
                sums += (part - total * OFFSET) * scale[:, :, None]
    made_at = made_ptr + tl.arange(0, 8)[None, :] * height + row[:, None]
    stored = (row < height)[:, None] & (tl.arange(0, 8) < ROWS_OF_X)[None, :]
    tl.store(made_at, tl.sum(sums, 0).to(dtype), mask=stored)


_product: Final = triton.autotune(list(CONFIGS), key=["height", "width", "ROWS_OF_X", "HAS_ZEROS"])(_product_kernel)
