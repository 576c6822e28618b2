"""What every emitter uses, the tensors in sight and the tile sizes, and what it makes: tile sets, still by name,
for one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flywheel.ir import BufferKind, DType, InstructionKind, Stretch, Tiles
from flywheel.lowering.tiling import Tiling
from flywheel.models.graph import Graph, Tensor


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


PARTIAL: Final = "partial."
"""How the names of attention's partials begin."""

PARTIAL_EXTRA: Final = 2
"""Columns of a partial after each head's output: row maximum and sum of exponentials."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One block of `graph`, to be emitted under `tiling`. `tensors` are those of the block and of what encloses it.

    `graph` is the graph of GPU `rank` of `ranks`.
    """

    graph: Graph
    tiling: Tiling
    tensors: Mapping[str, Tensor]
    rank: int = 0
    ranks: int = 1

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name. Partials, which come from tiling, have names but no entry in the graph."""
        if name.startswith(PARTIAL):
            width = self.graph.n_heads * (self.graph.head_dim + PARTIAL_EXTRA)
            return Tensor(name, BufferKind.ACTIVATION, DType.F32, (self.graph.batch, width))
        return self.tensors[name]

    def heads(self, n_kv_heads: int | None = None) -> dict[str, int]:
        """Head params of an operation over `n_kv_heads` KV heads and their query heads; by default over all heads of
        every sequence."""
        count = len(self.graph.streams) if n_kv_heads is None else n_kv_heads
        return {"head_dim": self.graph.head_dim, "n_heads": count * self.graph.group, "n_kv_heads": count}
