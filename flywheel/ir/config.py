"""ScheduleConfig: one point of the search space. Source: docs/ir.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """What a search proposes; the lowerer turns it into a program, always the same one.

    `tiling` holds integers per archetype and, refining it, per operation: `{"gemv": {"N_tile": 32},
    "gemv.down_proj": {"N_tile": 16}, "attention": {"kv_block": 128}, "stream": {"chunk_bytes": 32768}}`.
    `pipelining_depth` is the number of instructions ahead whose weights are prefetched; 0 turns prefetch off.
    """

    tiling: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    fusion_grouping: Sequence[Sequence[str]] = ()
    sm_assignment: str | Mapping[int, int] = "load_balance"
    pipelining_depth: int = 2
    page_allocation: str = "graph_color"
    threads_per_block: int = 256
    smem_bytes_per_block: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict; an explicit `sm_assignment` gets string keys."""
        assignment = self.sm_assignment
        return {
            "tiling": {op: dict(tiles) for op, tiles in self.tiling.items()},
            "fusion_grouping": [list(group) for group in self.fusion_grouping],
            "sm_assignment": (
                assignment if isinstance(assignment, str) else {str(task): sm for task, sm in assignment.items()}
            ),
            "pipelining_depth": self.pipelining_depth,
            "page_allocation": self.page_allocation,
            "threads_per_block": self.threads_per_block,
            "smem_bytes_per_block": self.smem_bytes_per_block,
        }

    @staticmethod
    def from_dict(data: object) -> ScheduleConfig:
        """Read a config; unknown fields are dropped. Raises IrFormatError."""
        from flywheel.ir.serde import config_from_dict

        return config_from_dict(data)

    @property
    def config_id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]
