"""Packing: a program as the tables of the device ABI. CPU and numpy only; the same program gives the same bytes."""

from flywheel.vm.pack.program import PackedProgram, pack

__all__ = ["PackedProgram", "pack"]
