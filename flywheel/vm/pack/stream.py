"""The weight stream of each SM: one segment a pass of a matrix step, and which operands are announced anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.ir.variant import FRAGMENT_K, SLICES_BESIDE
from flywheel.vm.abi import FRAGMENT_ROWS, InstructionFlag, SegmentFlag, StepFlag, numpy_struct

SEGMENT: Final = numpy_struct("amk_segment_t")

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """(which item, place within it) of `counts[i]` entries for each item i, in order."""
    item = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return item, np.arange(len(item)) - starts[item]


def matrix_entries(instructions: Rows, matrices: Sequence[Sequence[int]], forms: Ints) -> tuple[Ints, Ints]:
    """(instruction, row of the step table) of every matrix step that is run, in queue order.

    `matrices[f]` are the matrix steps of an instruction of form f, counted from its first step.
    """
    counts = np.array([len(each) for each in matrices], np.int64)
    firsts = np.cumsum(counts) - counts
    places = np.array([place for each in matrices for place in each], np.int64)
    instruction, number = expand(counts[forms])
    step = instructions["first_step"][instruction] + places[firsts[forms[instruction]] + number]
    return instruction, step


def tile_of(instructions: Rows, steps: Rows, instruction: Ints, step: Ints) -> tuple[Ints, Ints]:
    """(n_off, N_tile) of matrix steps: their own, or their task's."""
    values = []
    for name, own in (("n_off", StepFlag.OWN_N_OFF), ("N_tile", StepFlag.OWN_N_TILE)):
        named = steps["flags"][step] & int(own) != 0
        value = np.where(named, steps["params"][name][step], instructions["params"][name][instruction])
        values.append(value.astype(np.int64))
    return values[0], values[1]


def slice_starts(steps: Rows) -> Ints:
    """Fragments of K before those of each step: those of the slices before it."""
    blocks = steps["kblocks"].astype(np.int64)
    before = np.cumsum(blocks) - blocks
    return before - before[_first_slices(steps)]


def staged_blocks(steps: Rows) -> Ints:
    """Fragments of the staging area before what each step multiplies: those of the slices that lie beside it."""
    firsts = _first_slices(steps)
    number = np.arange(len(steps)) - firsts
    number = np.where(steps["flags"] & int(StepFlag.ALTERNATES), number % SLICES_BESIDE, number)
    rows = steps["rows"].astype(np.int64)
    each = rows * (steps["kblocks"][firsts].astype(np.int64) + (rows > 1))
    return np.where(_staged_beside(steps), number * each, 0)


def _first_slices(steps: Rows) -> Ints:
    """Of each step the first slice of its product; itself where that is whole."""
    carries = steps["flags"] & int(StepFlag.CARRIES) != 0
    return np.maximum.accumulate(np.where(carries, 0, np.arange(len(steps))))


def _staged_beside(steps: Rows) -> npt.NDArray[np.bool_]:
    """Whether each step is a slice that is staged beside the one before it."""
    return np.asarray(steps["flags"] & int(StepFlag.STAGED_AHEAD | StepFlag.ALTERNATES) != 0)


def segments_of(
    instructions: Rows,
    queues: npt.NDArray[np.int32],
    steps: Rows,
    buffers: Rows,
    entries: tuple[Ints, Ints],
    fragment_bytes: int,
    pass_blocks: int,
) -> tuple[Rows, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(segments SM after SM, whose src counts from the start of the weight; buffer of each; first one of each SM)."""
    instruction, step = entries
    n_off, n_tile = tile_of(instructions, steps, instruction, step)
    first_block = n_off // FRAGMENT_ROWS
    blocks = -(-(n_off + n_tile) // FRAGMENT_ROWS) - first_block
    entry, number = expand(-(-blocks // pass_blocks))
    instruction, step = instruction[entry], step[entry]
    weight = instructions["inputs"][instruction, steps["args"][step, 1]]
    row_stride = -(-buffers["shape"][weight, 1].astype(np.int64) // FRAGMENT_K) * fragment_bytes
    segments = np.zeros(len(entry), SEGMENT)
    segments["src"] = (first_block[entry] + number * pass_blocks) * row_stride
    starts = slice_starts(steps)
    segments["src"] += (starts[step] * fragment_bytes).astype(np.uint64)
    segments["x_kblocks"] = staged_blocks(steps)[step]
    segments["queue_index"] = instruction - queues[instructions["sm"][instruction]]
    segments["row_blocks"] = np.minimum(pass_blocks, blocks[entry] - number * pass_blocks)
    segments["row_stride"] = row_stride
    for name in ("kblocks", "chunk_kblocks", "row_chunks", "rows"):
        segments[name] = steps[name][step]
    announced = (number == 0) & (_staged_beside(steps) | (steps["flags"] & int(StepFlag.REUSE_X) == 0))[step]
    announced &= instructions["flags"][instruction] & int(InstructionFlag.X_STAGED) == 0
    segments["flags"][announced] = SegmentFlag.FRESH_X
    streams = np.searchsorted(instructions["sm"][instruction], np.arange(len(queues)))
    return segments, weight.astype(np.int32), streams.astype(np.int32)
