"""Packing: a program as the tables of the device ABI. CPU and numpy only; the same program gives the same bytes."""

from flywheel.vm.pack.program import PackedProgram, pack
from flywheel.vm.pack.ranks import RankMemory, pack_ranks, peer_addresses, ranks_table

__all__ = ["PackedProgram", "RankMemory", "pack", "pack_ranks", "peer_addresses", "ranks_table"]
