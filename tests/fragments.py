"""The order in which matrix weights lie in device memory, in numpy: what abi.Layout.FRAGMENTS says in words.

A block of 16 x 16 elements is what one `mma.m16n8k16` takes as its A operand; lane 4g + t of a warp loads its eight at
once. The instruction wants columns 2t, 2t + 1, 2t + 8 and 2t + 9 in them, but a sum over K may run in any order as long
as x follows it: columns 4t..4t + 3 let a lane read its part of x at once, too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.plan.staging import FRAGMENT_K, FRAGMENT_ROWS

LANES: Final = 32


def to_fragments(matrix: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A matrix [rows, width] of any type in fragment order, flat; zero where a fragment reaches beyond it."""
    rows, width = matrix.shape
    row_blocks, column_blocks = -(-rows // FRAGMENT_ROWS), -(-width // FRAGMENT_K)
    padded = np.zeros((row_blocks * FRAGMENT_ROWS, column_blocks * FRAGMENT_K), matrix.dtype)
    padded[:rows, :width] = matrix
    # [row block, half of it, g, column block, t, pair, element] -> [row block, column block, g, t, pair, half, element]
    return padded.reshape(row_blocks, 2, 8, column_blocks, 4, 2, 2).transpose(0, 3, 2, 4, 5, 1, 6).reshape(-1)


def from_fragments(flat: npt.NDArray[np.generic], rows: int, width: int) -> npt.NDArray[np.generic]:
    """The matrix [rows, width] that `to_fragments` took apart."""
    row_blocks, column_blocks = -(-rows // FRAGMENT_ROWS), -(-width // FRAGMENT_K)
    blocks = flat.reshape(row_blocks, column_blocks, 8, 4, 2, 2, 2).transpose(0, 5, 2, 1, 3, 4, 6)
    return blocks.reshape(row_blocks * FRAGMENT_ROWS, column_blocks * FRAGMENT_K)[:rows, :width]


def fragment_index(row: int, column: int, width: int) -> int:
    """Where element (row, column) of a matrix of `width` columns lies; EMBED finds the rows of its table so."""
    block = row // FRAGMENT_ROWS * -(-width // FRAGMENT_K) + column // FRAGMENT_K
    lane = row % 8 * 4 + column % FRAGMENT_K // 4
    return (block * LANES + lane) * 8 + column % 4 // 2 * 4 + row % FRAGMENT_ROWS // 8 * 2 + column % 2
