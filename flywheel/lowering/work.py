"""What emission produces: tile sets, still by name and for one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flywheel.ir import InstructionKind


class Tile(NamedTuple):
    """One task to be: its params and what it streams and computes."""

    params: Mapping[str, Any]
    est_bytes: int
    est_flops: int


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
    tiles: tuple[Tile, ...]
