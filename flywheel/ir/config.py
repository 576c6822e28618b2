"""ScheduleConfig, one point of the search space: its fields, its JSON and its id. Source: docs/ir.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flywheel.ir.fields import read_dict, read_int, read_int_map, read_list, read_str
from flywheel.ir.show import html_table


@dataclass(frozen=True, slots=True, repr=False)
class ScheduleConfig:
    """A schedule that a search proposes. The lowerer always makes the same program of it.

    `tiling` holds integers per archetype and, refining it, per operation: `{"gemv": {"N_tile": 32}, "gemv.down_proj":
    {"N_tile": 16}, "attention": {"kv_block": 128}, "stream": {"chunk_bytes": 32768}}`. `pipelining_depth` is how many
    instructions ahead weights are prefetched; 0 turns prefetch off.
    """

    tiling: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    fusion_grouping: Sequence[Sequence[str]] = ()
    sm_assignment: str | Mapping[int, int] = "load_balance"
    pipelining_depth: int = 2
    page_allocation: str = "none"
    threads_per_block: int = 256
    smem_bytes_per_block: int = 0

    @property
    def config_id(self) -> str:
        """The first 12 hex digits of the canonical JSON's SHA-256."""
        canonical = json.dumps(config_to_dict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def __repr__(self) -> str:
        return f"<ScheduleConfig {self.config_id}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [
            *((f"{op} {name}", size) for op, tiles in self.tiling.items() for name, size in tiles.items()),
            ("fusion_grouping", "; ".join(" ".join(group) for group in self.fusion_grouping)),
            ("sm_assignment", self.sm_assignment if isinstance(self.sm_assignment, str) else "explicit"),
            *((each.name, getattr(self, each.name)) for each in fields(self)[3:]),
        ]
        return html_table(f"ScheduleConfig {self.config_id}", rows)


def config_to_dict(config: ScheduleConfig) -> dict[str, Any]:
    """The config as a JSON-ready dict. An explicit `sm_assignment` gets string keys."""
    assignment = config.sm_assignment
    return {
        "tiling": {op: dict(tiles) for op, tiles in config.tiling.items()},
        "fusion_grouping": [list(group) for group in config.fusion_grouping],
        "sm_assignment": (
            assignment if isinstance(assignment, str) else {str(task): sm for task, sm in assignment.items()}
        ),
        "pipelining_depth": config.pipelining_depth,
        "page_allocation": config.page_allocation,
        "threads_per_block": config.threads_per_block,
        "smem_bytes_per_block": config.smem_bytes_per_block,
    }


def config_from_dict(data: object) -> ScheduleConfig:
    """Read a schedule config. Unknown fields are dropped, and absent ones take their defaults. Raises IrFormatError."""
    root = read_dict(data, "config")
    default = ScheduleConfig()
    tiling = {
        op: {
            name: read_int(size, f"config.tiling.{op}.{name}")
            for name, size in read_dict(tiles, f"config.tiling.{op}").items()
        }
        for op, tiles in read_dict(root.get("tiling", {}), "config.tiling").items()
    }
    grouping = tuple(
        tuple(read_str(name, "config.fusion_grouping") for name in read_list(group, "config.fusion_grouping"))
        for group in read_list(root.get("fusion_grouping", []), "config.fusion_grouping")
    )
    assignment = root.get("sm_assignment", default.sm_assignment)
    if not isinstance(assignment, str):
        assignment = read_int_map(assignment, "config.sm_assignment")

    def whole(name: str) -> int:
        return read_int(root.get(name, getattr(default, name)), f"config.{name}")

    return ScheduleConfig(
        tiling=tiling,
        fusion_grouping=grouping,
        sm_assignment=assignment,
        pipelining_depth=whole("pipelining_depth"),
        page_allocation=read_str(root.get("page_allocation", default.page_allocation), "config.page_allocation"),
        threads_per_block=whole("threads_per_block"),
        smem_bytes_per_block=whole("smem_bytes_per_block"),
    )
