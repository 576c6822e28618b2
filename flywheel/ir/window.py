"""Windows of attention that move with the position.

A token at position p of a layer with a window of `window` rows sees rows `max(0, p + 1 - window)` to p of its caches. A
task with the param `window` counts its `kv_start` from the first row in sight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def first_row(params: Mapping[str, Any]) -> int:
    """The row of a cache from which a task counts `kv_start`: 0 without `window`."""
    return max(0, params["pos"] + 1 - params["window"]) if "window" in params else 0


def rows_in_sight(params: Mapping[str, Any], pos: int) -> int:
    """How many rows, from `first_row` on, a token at `pos` sees, itself included."""
    return min(pos + 1, params["window"]) if "window" in params else pos + 1


def in_rows(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The params without `window`: with a `kv_start` that counts from row 0."""
    if "window" not in params:
        return params
    found = {**params, "kv_start": first_row(params) + params["kv_start"]}
    del found["window"]
    return found
