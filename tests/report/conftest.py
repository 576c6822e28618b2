from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from rows import completed

from flywheel.ir import config_to_dict
from flywheel.measure.record import TrialRecord
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.store.campaign import Campaign

MODEL, GPU = "smollm2-135m", "l4"


def _records(count: int, **changes: Any) -> list[TrialRecord]:
    """Predicted trials of known good schedules, with made-up latencies; `changes` go for all of them."""
    space = make_space(make_workload(MODEL, GPU, "bf16", 512))
    good = space.known_good()[0]
    choices = [{**good, "depth": depth, "chunk": chunk} for depth in (1, 2, 4, 8) for chunk in (4096, 8192)]
    rows = []
    for trial in range(count):
        config = space.to_config(choices[trial % len(choices)])
        row = {
            "campaign": "made", "trial": trial, "model": MODEL, "gpu": GPU, "dtype": "bf16", "context": 512,
            "config": json.dumps(config_to_dict(config)), "config_id": config.config_id, "program_id": "p",
            "source": "search", "outcome": "predicted", "predicted_us": 2000.0 + trial % 8 * 37,
            "predictor": "1", "floor_us": 1500.0, "sampler": "tpe", "seed": 0,
            "ir_version": "0.2.0", "python": "3.11",
            "host": "lab", "created_at": "2026-01-02T03:04:05+00:00",
        }  # fmt: skip
        rows.append(TrialRecord(**completed({**row, **changes})))
    return rows


def _campaign(**changes: Any) -> Campaign:
    fields = {"name": "made", "model": MODEL, "gpu": GPU, "dtype": "bf16", "context": 512, "batch": 1,
              "measure": "predict", "sampler": "tpe", "seed": 0, "spec": "{}",
              "created_at": "2026-01-02T03:04:05+00:00"}  # fmt: skip
    return Campaign(**{**fields, **changes})


@pytest.fixture(scope="session")
def make_records() -> Callable[..., list[TrialRecord]]:
    """Factory of rows: `make_records(count, **changes)`."""
    return _records


@pytest.fixture(scope="session")
def make_campaign() -> Callable[..., Campaign]:
    """Factory of campaigns: `make_campaign(**changes)`."""
    return _campaign
