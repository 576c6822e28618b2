"""The weight stream of each SM: one segment for each pass of a matrix step and slice of K. Segments also say which
operands are announced again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.plan import KernelVariant
from flywheel.plan.chunks import chunking, merges, quickest_chunks
from flywheel.plan.formats import UNIT_ALIGNMENT, UNIT_GROUPS, UNIT_K
from flywheel.plan.staging import FRAGMENT_K, FRAGMENT_ROWS
from flywheel.plan.step import MatrixCoding
from flywheel.vm.abi import (
    FORMAT_SHIFT,
    TAIL_SHIFT,
    UNIT_SHIFT,
    InstructionFlag,
    SegmentFlag,
    StepFlag,
    numpy_struct,
)

SEGMENT: Final = numpy_struct("amk_segment_t")

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """(item, place within the item) of `counts[i]` entries for each item i, in order."""
    item = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return item, np.arange(len(item)) - starts[item]


def matrix_entries(instructions: Rows, matrices: Sequence[Sequence[int]], forms: Ints) -> tuple[Ints, Ints]:
    """(instruction, row of the step table) of every matrix step that runs, in queue order.

    `matrices[f]` are the matrix steps of an instruction of form f, counted from its first step.
    """
    counts = np.array([len(each) for each in matrices], np.int64)
    firsts = np.cumsum(counts) - counts
    places = np.array([place for each in matrices for place in each], np.int64)
    instruction, number = expand(counts[forms])
    step = instructions["first_step"][instruction] + places[firsts[forms[instruction]] + number]
    return instruction, step


def tile_of(instructions: Rows, steps: Rows, instruction: Ints, step: Ints) -> tuple[Ints, Ints]:
    """(n_off, N_tile) of matrix steps, from the step or from its task."""
    values = []
    for name, own in (("n_off", StepFlag.OWN_N_OFF), ("N_tile", StepFlag.OWN_N_TILE)):
        named = steps["flags"][step] & int(own) != 0
        value = np.where(named, steps["params"][name][step], instructions["params"][name][instruction])
        values.append(value.astype(np.int64))
    return values[0], values[1]


def spread_chunks(
    instructions: Rows, steps: Rows, entries: tuple[Ints, Ints], kinds: Rows, variant: KernelVariant
) -> Rows:
    """The steps, where quantised matrices of short tiles come in smaller chunks: the quickest for a product's highest
    tile. Operands in slices keep theirs.
    """
    instruction, step = entries
    n_off, n_tile = tile_of(instructions, steps, instruction, step)
    row_blocks = np.zeros(len(steps), np.int64)
    np.maximum.at(row_blocks, step, -(-(n_off + n_tile) // FRAGMENT_ROWS) - n_off // FRAGMENT_ROWS)
    weights = instructions["inputs"][instruction, steps["args"][step, 1]]
    spread = steps.copy()
    for row in np.unique(step[kinds["format"][weights] > 0]):
        product = spread[row]["as"]["product"]
        depth = int(steps[row]["params"]["K"])
        if product["kblocks"] * FRAGMENT_K < depth:
            continue
        least, blocks = int(product["row_chunks"]), int(row_blocks[row])
        product["row_chunks"] = quickest_chunks(-(-depth // UNIT_K), least, blocks, variant)
    return spread


def blocks_of(coded: Mapping[int, MatrixCoding], fragment_bytes: int, buffers: int) -> Rows:
    """For each matrix buffer: the fragments along K of a K block, their bytes, and the number of its format."""
    blocks = np.zeros(buffers, [("fragments", "i8"), ("nbytes", "i8"), ("format", "i8")])
    blocks["fragments"], blocks["nbytes"] = 1, fragment_bytes
    for row, each in coded.items():
        blocks[row] = UNIT_K // FRAGMENT_K, each.coding.unit_bytes, each.coding.number
    return blocks


def _format_flags(kind: Any, taken: Ints) -> npt.NDArray[np.uint32]:
    """Format flags of segments with `taken` fragments of K; 0 for an unquantised matrix."""
    tail = (taken - 1) % kind["fragments"] // UNIT_GROUPS + 1
    flags = (
        kind["nbytes"] // UNIT_ALIGNMENT << UNIT_SHIFT | kind["format"] << FORMAT_SHIFT | tail << TAIL_SHIFT
    )
    return np.where(kind["format"] > 0, flags, 0).astype(np.uint32)


def segments_of(
    instructions: Rows,
    queues: npt.NDArray[np.int32],
    steps: Rows,
    buffers: Rows,
    entries: tuple[Ints, Ints],
    kinds: Rows,
    variant: KernelVariant,
    pass_blocks: int,
) -> tuple[Rows, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(segments by SM, with src relative to the start of the weight; the buffer of each; the first segment of each
    SM)."""
    instruction, step = entries
    n_off, n_tile = tile_of(instructions, steps, instruction, step)
    first_block = n_off // FRAGMENT_ROWS
    blocks = -(-(n_off + n_tile) // FRAGMENT_ROWS) - first_block
    depth = -(-steps["params"]["K"][step].astype(np.int64) // FRAGMENT_K)
    rows, each, beside = (
        steps["as"]["product"][name][step].astype(np.int64) for name in ("rows", "kblocks", "beside")
    )
    slices = -(-depth // each)
    weight = instructions["inputs"][instruction, steps["args"][step, 1]]
    kind: Any = kinds[weight]
    in_blocks = [-(-count // kind["fragments"]) for count in (depth, each)]
    merged = (blocks == 1) & (depth % each == 0) & merges(in_blocks[0], in_blocks[1], kind["nbytes"], variant)
    entry, number = expand(-(-blocks // pass_blocks) * np.where(merged, 1, slices))
    instruction, step, depth, rows, each, beside, slices, merged, weight, kind = (
        column[entry] for column in (instruction, step, depth, rows, each, beside, slices, merged, weight, kind)
    )
    pass_, slice_ = np.divmod(number, np.where(merged, 1, slices))
    fragments, nbytes = kind["fragments"], kind["nbytes"]
    row_stride = -(-buffers["shape"][weight, 1].astype(np.int64) // (FRAGMENT_K * fragments)) * nbytes
    taken = np.where(merged, depth, np.minimum(each, depth - slice_ * each))
    kblocks = -(-np.minimum(each, taken) // fragments)
    segments = np.zeros(len(entry), SEGMENT)
    segments["src"] = (first_block[entry] + pass_ * pass_blocks) * row_stride + slice_ * (each // fragments) * nbytes
    segments["x_kblocks"] = slice_ % beside * rows * (each + (rows > 1))
    segments["queue_index"] = instruction - queues[instructions["sm"][instruction]]
    segments["row_blocks"] = np.minimum(pass_blocks, blocks[entry] - pass_ * pass_blocks)
    segments["row_stride"], segments["kblocks"], segments["rows"] = row_stride, kblocks, rows
    wanted = np.where(slices > 1, 1, steps["as"]["product"]["row_chunks"][step])
    segments["chunk_kblocks"], segments["row_chunks"] = chunking(kblocks, nbytes, variant.chunk_bytes, wanted)
    for name, value in (
        ("slice_chunks", segments["row_chunks"]),
        ("row_chunks", segments["row_chunks"] * slices),
        ("kblocks", depth // fragments),
    ):
        segments[name][merged] = value[merged]
    segments["flags"] = _format_flags(kind, taken)
    fresh = (steps["flags"][step] & int(StepFlag.REUSE_X) == 0) & ((pass_ == 0) | (slices > beside))
    fresh &= instructions["flags"][instruction] & int(InstructionFlag.X_STAGED) == 0
    for marked, flag in (
        (fresh, SegmentFlag.FRESH_X),
        (slice_ > 0, SegmentFlag.CONTINUES),
        (~merged & (slice_ < slices - 1), SegmentFlag.GOES_ON),
    ):
        segments["flags"][marked] |= np.uint32(flag)
    streams = np.searchsorted(instructions["sm"][instruction], np.arange(len(queues)))
    return segments, weight.astype(np.int32), streams.astype(np.int32)
