"""The weight stream of each SM as the table of segments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.plan.formats import UNIT_ALIGNMENT, UNIT_GROUPS
from flywheel.plan.staging import FRAGMENT_K
from flywheel.plan.step import MatrixCoding
from flywheel.plan.stream import Ints, MatrixBlocks, Stream
from flywheel.vm.abi import FORMAT_SHIFT, TAIL_SHIFT, UNIT_SHIFT, SegmentFlag, numpy_struct

SEGMENT: Final = numpy_struct("amk_segment_t")

Rows = npt.NDArray[np.void]


def segments_of(
    stream: Stream,
    blocks: MatrixBlocks,
    coded: Mapping[int, MatrixCoding],
    buffers: Rows,
    instructions: Rows,
    queues: npt.NDArray[np.int32],
) -> tuple[Rows, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(segments by SM, with src relative to the start of the weight; the buffer of each; the first segment of each
    SM)."""
    weight, sms = stream.weight, instructions["sm"][stream.task]
    fragments, nbytes = blocks.fragments[weight], blocks.nbytes[weight]
    segments = np.zeros(len(weight), SEGMENT)
    row_stride = -(-buffers["shape"][weight, 1].astype(np.int64) // (FRAGMENT_K * fragments)) * nbytes
    segments["src"] = stream.row_block * row_stride + stream.k_block * nbytes
    segments["queue_index"] = stream.task - queues[sms]
    segments["row_stride"] = row_stride
    for name in ("row_blocks", "kblocks", "chunk_kblocks", "row_chunks", "slice_chunks", "rows"):
        segments[name] = getattr(stream, name)
    segments["flags"] = _format_flags(stream, blocks, coded)
    for marked, flag in (
        (stream.fresh, SegmentFlag.FRESH_X),
        (stream.continues, SegmentFlag.CONTINUES),
        (stream.goes_on, SegmentFlag.GOES_ON),
    ):
        segments["flags"][marked] |= np.uint32(flag)
    return segments, weight.astype(np.int32), np.searchsorted(sms, np.arange(len(queues))).astype(np.int32)


def _format_flags(stream: Stream, blocks: MatrixBlocks, coded: Mapping[int, MatrixCoding]) -> npt.NDArray[np.uint32]:
    """The format flags of each segment; 0 for an unquantised matrix."""
    formats: Ints = np.zeros(len(blocks.nbytes), np.int64)
    formats[list(coded)] = [each.coding.number for each in coded.values()]
    number, weight = formats[stream.weight], stream.weight
    tail: Any = (stream.fragments - 1) % blocks.fragments[weight] // UNIT_GROUPS + 1
    flags = blocks.nbytes[weight] // UNIT_ALIGNMENT << UNIT_SHIFT | number << FORMAT_SHIFT | tail << TAIL_SHIFT
    return np.where(number > 0, flags, 0).astype(np.uint32)
