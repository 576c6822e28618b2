"""The chunks in which the loader brings a matrix: how many a row block has, and which slices share a segment."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.plan.variant import KernelVariant

CHUNK_UNITS: Final = 0.5
"""What a chunk costs a warp besides its units, in units (results/gpu/h100/latency.txt, part 3)."""

Ints = npt.NDArray[np.int64]


def chunking(kblocks: Any, fragment_bytes: int, chunk_bytes: int, wanted: Any = 1) -> tuple[Any, Any]:
    """(fragments of a chunk, chunks of a row block) for `kblocks` fragments. Chunks are of nearly equal size, at most
    `chunk_bytes`, and at least about `wanted`. A fragment is no larger than that."""
    least = np.maximum(-(-kblocks // (chunk_bytes // fragment_bytes)), wanted)
    chunk_kblocks = -(-kblocks // least)
    return chunk_kblocks, -(-kblocks // chunk_kblocks)


def quickest_chunks(units: int, least: int, blocks: int, variant: KernelVariant) -> int:
    """The chunks of a row block of `units` units of a quantised matrix, at least `least`, at which a tile of `blocks`
    row blocks takes the least time.

    A group of warps multiplies whole chunks. So large chunks leave groups without work if a tile has few row blocks.
    """

    def time(chunks: int) -> float:
        rounds = -(-blocks * chunks // variant.chunk_groups)
        return rounds * (-(-units // chunks) / variant.chunk_warps + CHUNK_UNITS)

    return int(chunking(units, 1, units, min(range(least, units + 1), key=time))[1])


def merges(depth: Ints, each: Ints, block_bytes: Any, variant: KernelVariant) -> npt.NDArray[np.bool_]:
    """Whether slices of `each` K blocks can share a segment.

    They must have equal sizes and chunks of equal sizes, with chunks for every group of warps. Only kernels for several
    rows support such segments, since a single row is seldom long.
    """
    chunk_kblocks, chunks = chunking(each, block_bytes, variant.chunk_bytes)
    if variant.rows <= 1:
        return np.zeros(len(depth), np.bool_)
    enough = depth // each * chunks >= variant.chunk_groups
    return np.asarray(enough & (each < depth) & (depth % each == 0) & (each % chunk_kblocks == 0))
