from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rows import completed

from flywheel.ir.config import ScheduleConfig, config_to_dict
from flywheel.ir.files import dump_json
from flywheel.measure.record import TrialRecord

CONFIG = ScheduleConfig(tiling={"gemv": {"N_tile": 32}}, pipelining_depth=4)
BASE: dict[str, Any] = {
    "campaign": "first", "trial": 0, "model": "llama3.2-1b", "gpu": "h100", "dtype": "bf16", "context": 512,
    "config": dump_json(config_to_dict(CONFIG), None), "config_id": CONFIG.config_id, "source": "search",
    "sampler": "tpe", "seed": 0, "ir_version": "0.2.0",
    "python": "3.11.7", "host": "lab", "created_at": "2026-01-02T03:04:05+00:00",
}  # fmt: skip
OUTCOMES: dict[str, dict[str, Any]] = {
    "predicted": {"predicted_us": 900.5, "predictor": "1"},
    "measured": {"latency_us": 1000.25},
}


def _record(outcome: str = "predicted", **changes: Any) -> TrialRecord:
    return TrialRecord(**completed({**BASE, "outcome": outcome, **OUTCOMES.get(outcome, {"reason": "why"}), **changes}))


@pytest.fixture(scope="session")
def make_record() -> Callable[..., TrialRecord]:
    """Factory of rows of any outcome: `make_record(outcome, **changes)`."""
    return _record
