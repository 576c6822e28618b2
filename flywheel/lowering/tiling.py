"""Tile sizes: the config's, checked, and the defaults for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import InstructionKind, ScheduleConfig
from flywheel.models.graph import Graph

ROW_QUANTUM: Final = 16
"""Rows of one matrix fragment (mma.m16n8k16). Tiles are multiples of it."""

KV_QUANTUM: Final = 16
DEFAULT_KV_BLOCK: Final = 128

_SIZES: Final = {
    "gemv": ("N_tile",),
    "attention": ("kv_block",),
    "stream": ("chunk_bytes", "inflight_bytes", "copies", "past", "pause_cycles"),
    "warps": ("matrix", "chunk"),
    "hand_off": ("data", "slices"),
    "exchange": ("bits",),
}

_TILES: Final = ("gemv", "attention")
"""Families whose sizes cut tensors. The kernel variant checks the sizes of the others."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows per projection tile and positions per attention tile. Build it with `read_tiling`."""

    config: ScheduleConfig
    num_sms: int
    kv_block: int

    def rows(self, projection: str, n_out: int) -> int:
        """Rows of a full tile of `projection`: its own size, else gemv's, else such that each SM gets one tile."""
        tiling = self.config.tiling
        for key in (f"gemv.{projection}", "gemv"):
            rows = tiling.get(key, {}).get("N_tile")
            if rows is not None:
                return min(rows, n_out)
        return min(even_rows(n_out, self.num_sms), n_out)

    def cuts(self, projection: str, n_out: int) -> list[tuple[int, int, int]]:
        """(first row, rows of a tile, number of tiles) of the whole tiles and, if there is one, of the shorter last
        tile."""
        rows = self.rows(projection, n_out)
        whole, rest = divmod(n_out, rows)
        return [(0, rows, whole), *([(n_out - rest, rest, 1)] if rest else [])]

    def kv_blocks(self, rows: int) -> list[tuple[int, int]]:
        """(first row, rows) of each KV block of the rows that a layer attends to."""
        return [(start, min(self.kv_block, rows - start)) for start in range(0, rows, self.kv_block)]


def even_rows(n_out: int, parts: int) -> int:
    """Rows of a tile when `n_out` rows are divided into `parts` as evenly as fragments allow."""
    return -(-n_out // (parts * ROW_QUANTUM)) * ROW_QUANTUM


def read_tiling(config: ScheduleConfig, graph: Graph, num_sms: int) -> Tiling:
    """Check every key and size of `config.tiling`. Raises ConfigError."""
    ops = [op for block in graph.blocks for op in block.ops]
    projections = list(dict.fromkeys(op.name for op in ops if op.kind is InstructionKind.GEMV_TILE))
    for archetype, sizes in config.tiling.items():
        family, dot, projection = archetype.partition(".")
        if family not in _SIZES or (dot and (family != "gemv" or projection not in projections)):
            known = ", ".join([*_SIZES, *(f"gemv.{name}" for name in projections)])
            raise ConfigError(f"tiling: {archetype!r} is not one of {known}")
        for name, size in sizes.items():
            if name not in _SIZES[family]:
                known = " and ".join(map(repr, _SIZES[family]))
                raise ConfigError(f"tiling.{archetype}: {name!r} is not a size of {family}, which has {known}")
            quantum = ROW_QUANTUM if family == "gemv" else KV_QUANTUM
            if family in _TILES and (size <= 0 or size % quantum):
                raise ConfigError(f"tiling.{archetype}.{name}={size} is not a positive multiple of {quantum}")
    kv_block = config.tiling.get("attention", {}).get("kv_block", DEFAULT_KV_BLOCK)
    return Tiling(config, num_sms, min(kv_block, graph.most_attended))
