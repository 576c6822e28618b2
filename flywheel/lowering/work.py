"""What emission produces: tile sets, still by name and for one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flywheel.ir import InstructionKind, Stretch, Tiles


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tasks that share operands and the counter that they signal.

    `stage` names the sets that run side by side and are spread over the SMs together; `signal` the counter, which sets
    that write tiles of one buffer share. Waits follow from the operands. Where several GPUs share the program, GPU
    `rank` has the tasks, and `NAME@RANK` is what another one has; `pushes` those whose output and signal that is.
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
    """The tiles of a set that has one."""
    return Tiles((Stretch(params, est_bytes, est_flops, 1),))
