"""What every emitter uses: the tensors in sight and the tile sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flywheel.ir import BufferKind, DType
from flywheel.lowering.tiling import Tiling
from flywheel.models.graph import Graph, Tensor

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

    @property
    def dtype(self) -> DType:
        """Element type of activations and weights."""
        return self.graph.dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name. Partials, which come from tiling, have names but no entry in the graph."""
        if name.startswith("partial."):
            width = self.graph.n_heads * (self.graph.head_dim + PARTIAL_EXTRA)
            return Tensor(name, BufferKind.ACTIVATION, DType.F32, (self.graph.batch, width))
        return self.tensors[name]

    def heads(self, n_kv_heads: int | None = None) -> dict[str, int]:
        """Head params of an operation over `n_kv_heads` KV heads and their query heads; by default over all heads of
        every sequence."""
        count = len(self.graph.streams) if n_kv_heads is None else n_kv_heads
        return {"head_dim": self.graph.head_dim, "n_heads": count * self.graph.group, "n_kv_heads": count}
