"""What emission produces: tile sets, still by name, for one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flywheel.ir import InstructionKind, Stretch, Tiles


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tasks that share operands and the counter that they signal.

    Sets of one `stage` run side by side and are spread over the SMs together. `signal` names the counter; sets that
    write tiles of one buffer share it. Waits follow from the operands. In a program of several GPUs, GPU `rank` has the
    tasks, and `NAME@RANK` belongs to another GPU. With `pushes`, the output and the signal are such.
    """

    name: str
    stage: str
    op: InstructionKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signal: str
    tiles: Tiles
    rank: int = 0
    pushes: bool = False


def one_tile(params: Mapping[str, Any], est_bytes: int, est_flops: int) -> Tiles:
    """The tiles of a set of one tile."""
    return Tiles((Stretch(params, est_bytes, est_flops, 1),))
