"""The runs of operations that fuse, in a model that has all of today's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flywheel.ir import DType
from flywheel.lowering.fusion import Pattern, patterns_of
from flywheel.models.decoder import decode_step
from flywheel.models.graph import Graph
from flywheel.models.spec import DecoderSpec

_NAMES: Final = ("qkv", "out", "mlp_in", "down", "append", "attention", "append+attention", "head")


def patterns_by_name(graph: Graph) -> dict[str, Pattern]:
    """A graph's patterns by the names of docs/ir.md."""
    found = [pattern for block in graph.blocks for pattern in patterns_of(graph, block)]
    return dict(zip(_NAMES, found, strict=True))


PATTERNS: Final[Mapping[str, Pattern]] = patterns_by_name(
    decode_step(DecoderSpec("all", "qwen3", 64, 96, 1, 4, 2, 16, 80, 1e4, 1e-6, 64, qk_norm=True), 1, DType.BF16)
)
