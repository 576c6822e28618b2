"""From groups of operations to tile sets, one file for each family of operations."""

from __future__ import annotations

from collections.abc import Sequence

from flywheel.ir import InstructionKind
from flywheel.lowering.emit.attention import emit_attention, emit_combine, merge_limit
from flywheel.lowering.emit.exchange import emit_exchange
from flywheel.lowering.emit.pointwise import emit_single
from flywheel.lowering.emit.projection import emit_projection
from flywheel.lowering.emit.scope import Scope, TileSet
from flywheel.lowering.fusion import Group

_CACHE_OPS = (InstructionKind.KV_APPEND, InstructionKind.ATTENTION_TILE)
_EXCHANGES = (InstructionKind.ALLREDUCE_SHARD, InstructionKind.COPY)


def emit_block(scope: Scope, groups: Sequence[Group]) -> list[TileSet]:
    """Tile sets of one block, in execution order. Raises ConfigError where sizes and fusions contradict each other."""
    sets: list[TileSet] = []
    merging = next((group for group in groups if group.merges), None)
    left: list[str] = []
    for group in groups:
        kinds = {op.kind for op in group.ops}
        if InstructionKind.GEMV_TILE in kinds:
            sets += emit_projection(scope, group, left if group.merges else ())
        elif not kinds.isdisjoint(_EXCHANGES):
            sets += emit_exchange(scope, group.ops[0])
        elif kinds.isdisjoint(_CACHE_OPS):
            sets += emit_single(scope, group.ops[0])
        else:
            sets += emit_attention(scope, group)
        if InstructionKind.ATTENTION_TILE in kinds:
            limit = 1 if merging is None else merge_limit(scope, merging)
            merged, left = emit_combine(scope, group, limit)
            sets += merged
    return sets
