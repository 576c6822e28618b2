"""The weight stream of each SM as the table of segments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.plan.formats import UNIT_ALIGNMENT, UNIT_GROUPS
from flywheel.plan.past import StreamedRows
from flywheel.plan.staging import FRAGMENT_K
from flywheel.plan.step import MatrixCoding
from flywheel.plan.stream import Ints, MatrixBlocks, Stream
from flywheel.vm.abi import FORMAT_SHIFT, TAIL_SHIFT, UNIT_SHIFT, SegmentFlag, numpy_struct
from flywheel.vm.pack.instructions import picked

SEGMENT: Final = numpy_struct("amk_segment_t")

Rows = npt.NDArray[np.void]


def segments_of(
    stream: Stream,
    past: StreamedRows,
    blocks: MatrixBlocks,
    coded: Mapping[int, MatrixCoding],
    buffers: Rows,
    instructions: Rows,
    queues: npt.NDArray[np.int32],
) -> tuple[Rows, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(segments by SM, with src relative to the start of the weight or cache; the buffer of each; the first segment of
    each SM)."""
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
    task, rows = stream.task, weight
    if len(past.task):
        own, rows = _past_segments(past, instructions, queues), np.concatenate([weight, past.keys, past.values])
        task = np.concatenate([task, past.task, past.task])
        order = np.argsort(task, kind="stable")  # of a task's rows, the keys first
        segments, rows, task = picked(np.concatenate([segments, own]), order), rows[order], task[order]
    sms = instructions["sm"][task]
    return segments, rows.astype(np.int32), np.searchsorted(sms, np.arange(len(queues))).astype(np.int32)


def _past_segments(past: StreamedRows, instructions: Rows, queues: npt.NDArray[np.int32]) -> Rows:
    """The segments of all keys, then those of all values."""
    keys, values = (np.zeros(len(past.task), SEGMENT) for _ in range(2))
    keys["row_blocks"], keys["row_stride"], keys["chunk_kblocks"] = past.sequence, past.row_bytes, past.chunk_rows
    keys["rows"], keys["row_chunks"], keys["kblocks"] = past.pos, past.kv_start, past.kv_len
    keys["slice_chunks"] = past.window
    for each in (keys, values):
        each["queue_index"] = past.task - queues[instructions["sm"][past.task]]
        each["flags"] = SegmentFlag.PAST
    return np.concatenate([keys, values])


def chunks_before(stream: Stream, past: StreamedRows, sms: npt.NDArray[np.int32]) -> Ints:
    """For each task of `past`: the chunks of weights before it on its SM. `sms` has each task's SM."""
    ends = np.concatenate(([0], np.cumsum(stream.row_blocks * stream.row_chunks)))
    before = np.searchsorted(stream.task, past.task)
    first = np.searchsorted(sms[stream.task], sms[past.task])
    return np.asarray(ends[before] - ends[first], np.int64)


def _format_flags(stream: Stream, blocks: MatrixBlocks, coded: Mapping[int, MatrixCoding]) -> npt.NDArray[np.uint32]:
    """The format flags of each segment; 0 for an unquantised matrix."""
    formats: Ints = np.zeros(len(blocks.nbytes), np.int64)
    formats[list(coded)] = [each.coding.number for each in coded.values()]
    number, weight = formats[stream.weight], stream.weight
    tail: Any = (stream.fragments - 1) % blocks.fragments[weight] // UNIT_GROUPS + 1
    flags = blocks.nbytes[weight] // UNIT_ALIGNMENT << UNIT_SHIFT | number << FORMAT_SHIFT | tail << TAIL_SHIFT
    return np.where(number > 0, flags, 0).astype(np.uint32)
