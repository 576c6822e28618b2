from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rows import completed

from flywheel.measure.record import TrialRecord


def _record(**changes: Any) -> TrialRecord:
    fields: dict[str, Any] = {
        "campaign": "first",
        "trial": 0,
        "model": "llama3.2-1b",
        "gpu": "h100",
        "dtype": "BF16",
        "context": 512,
        "config": "{}",
        "config_id": "44136fa355b3",
        "outcome": "rejected",
        "source": "search",
        "sampler": "tpe",
        "seed": 0,
        "ir_version": "0.2.0",
        "python": "3.11.7",
        "host": "lab",
        "created_at": "2026-01-02T03:04:05+00:00",
    }
    return TrialRecord(**completed({**fields, **changes}))


@pytest.fixture(scope="session")
def make_record() -> Callable[..., TrialRecord]:
    """Factory of rows, rejected unless `outcome` says otherwise."""
    return _record
