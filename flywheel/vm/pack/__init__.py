"""Packing: turns a program into the tables of the device ABI, on the CPU. The same program gives the same bytes."""

from flywheel.vm.pack.program import PackedProgram, pack
from flywheel.vm.pack.ranks import (
    AnyPacked,
    PackedRanks,
    RankMemory,
    images_table,
    pack_any,
    pack_ranks,
    ranks_table,
)

__all__ = [
    "AnyPacked", "PackedProgram", "PackedRanks", "RankMemory", "images_table", "pack", "pack_any", "pack_ranks",
    "ranks_table",
]  # fmt: skip
