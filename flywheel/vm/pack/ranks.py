"""The tables of each GPU of a multi-GPU program, and the addresses of the other GPUs' memory that each needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import ABI_MAX_ROWS, MAX_RANKS, MegakernelProgram
from flywheel.plan.program import rank_plans
from flywheel.vm.abi import COUNTER_STRIDE, numpy_struct
from flywheel.vm.pack.program import PackedProgram, pack, pack_plan

WORDS_BYTES: Final = MAX_RANKS * COUNTER_STRIDE + 2 * MAX_RANKS * ABI_MAX_ROWS * 8
"""Bytes of a GPU's words: the number of launches that each GPU has begun, and each GPU's largest logit per row, in two
sets. They are zero before the first launch and after an abort."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one GPU that others write, as device addresses that all GPUs of the program can use.

    `arena` is its allocation of `arena.nbytes + arena.awaited_bytes` bytes, and `words` one of WORDS_BYTES.
    """

    arena: int
    words: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedRanks:
    """A multi-GPU program, and the tables of each GPU, by rank."""

    program: MegakernelProgram
    parts: tuple[PackedProgram, ...]


AnyPacked = PackedProgram | PackedRanks
"""A program with its tables, for one GPU or several."""


def pack_any(program: MegakernelProgram) -> AnyPacked:
    """The tables of a program that `validate(strict=True)` accepts. Raises as `pack` and `pack_ranks` do."""
    return pack(program) if program.ranks == 1 else PackedRanks(program, pack_ranks(program))


def pack_ranks(program: MegakernelProgram) -> tuple[PackedProgram, ...]:
    """The tables of each GPU, by rank, of a program that `validate(strict=True)` accepts.

    Before the first launch, and again after an abort, counters, state and words must be 0 on all GPUs, and all bits of
    both sets of awaited buffers must be 1. All GPUs launch alike: the Nth launch of one meets the Nth launch of the
    others. Raises ConfigError and InvalidProgramError as `pack`.
    """
    return aligned([pack_plan(plan) for plan in rank_plans(program)])


def aligned(packed: Sequence[PackedProgram]) -> tuple[PackedProgram, ...]:
    """The same tables with arenas of equal size, so that the second awaited set has the same offset from the first on
    each GPU."""
    nbytes = max(each.arena.nbytes for each in packed)
    return tuple(replace(each, arena=replace(each.arena, nbytes=nbytes)) for each in packed)


def images_table(packed: Sequence[PackedProgram], rank: int, memories: Sequence[RankMemory]) -> npt.NDArray[np.uint64]:
    """[buffer, rank]: the address, in the first set, to which GPU `rank`'s tasks push a buffer on each rank; 0 if they
    do not push it there.

    `packed` and `memories` have the tables and memory of all ranks, in order.
    """
    part = packed[rank].part
    assert part is not None
    places = [
        {each.program.buffers[row].id: offset for row, offset in each.arena.offsets.items()} for each in packed
    ]
    table = np.zeros((len(packed[rank].program.buffers), MAX_RANKS), np.uint64)
    for row, buffer in enumerate(packed[rank].program.buffers):
        for home, number in part.images.get(buffer.id, {}).items():
            table[row, home] = memories[home].arena + places[home][number]
    return table


def ranks_table(packed: PackedProgram, memories: Sequence[RankMemory], images: int) -> npt.NDArray[np.void]:
    """The `amk_ranks_t` of a GPU with these tables. It directly follows the GPU's `amk_program_t`. `images` is the
    device address of its `images_table`."""
    assert packed.part is not None
    table = np.zeros(1, numpy_struct("amk_ranks_t"))
    table["rank"], table["ranks"], table["images"] = packed.part.rank, len(memories), images
    table["arrivals"], table["choice"] = packed.arrivals, packed.choice
    table["words"][0, : len(memories)] = [memory.words for memory in memories]
    return table
