"""What emission produces: tile sets, still by name and for one layer."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.ir import InstructionKind, Tile, Tiles


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tasks that share operands and the counter that they signal.

    `stage` names the sets that run side by side and are spread over the SMs together; `signal` the counter, which sets
    that write tiles of one buffer share. Waits follow from the operands.
    """

    name: str
    stage: str
    op: InstructionKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signal: str
    tiles: Tiles | tuple[Tile, ...]
