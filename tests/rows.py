"""Fields of made-up trials, completed to what a row of their outcome must have."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from flywheel.measure.record import TrialRecord


def config_id_of(text: str) -> str:
    """The id of a config that is JSON."""
    return sha256(json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


def completed(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with one sequence a step and, where the outcome asks for them and they are not given, percentiles at the
    latency, samples and the fraction of the floor."""
    row = {"batch": 1, **fields}
    latency_us = row.get("latency_us") if row["outcome"] == "measured" else None
    if latency_us is not None:
        row = {"p10_us": latency_us, "p90_us": latency_us, "samples": 30, **row}
    objective_us = row.get("predicted_us") if row["outcome"] == "predicted" else latency_us
    if row.get("floor_us") and objective_us:
        row.setdefault("floor_fraction", row["floor_us"] / objective_us)
    return row


def timed(row: TrialRecord, latency_us: float, **changes: Any) -> TrialRecord:
    """`row` as one that was measured to take `latency_us`, with `changes`."""
    old = dict.fromkeys(("p10_us", "p90_us", "samples", "floor_fraction"))
    kept = {name: value for name, value in asdict(row).items() if name not in old}
    return TrialRecord(**completed({**kept, "outcome": "measured", "latency_us": latency_us, **changes}))
