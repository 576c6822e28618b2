"""Coordinators that are killed with no chance to say goodbye."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from effort import LONG, examples, pairs

ROOT = Path(__file__).parents[2]
STORES = ("sqlite", "postgresql")
SAMPLERS = ("tpe", "grid")
CASES = [
    *(pytest.param(*case, 50, "1,2", marks=pytest.mark.slow) for case in product(STORES, SAMPLERS)),
    *(
        pytest.param(*case, examples(3, 2), "1", marks=[LONG] if number else [])
        for number, case in enumerate(pairs(STORES, SAMPLERS))
    ),
]


@pytest.mark.parametrize(("store_url", "sampler", "kills", "jobs"), CASES, indirect=["store_url"])
def test_a_campaign_whose_coordinator_is_killed_resumes_without_loss_or_repeat(
    store_url: str, sampler: str, kills: int, jobs: str
) -> None:
    script = [sys.executable, str(ROOT / "experiments" / "crash_resume.py")]
    done = subprocess.run(
        [*script, "--kills", str(kills), "--jobs", jobs, "--samplers", sampler, "--store", store_url],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(row[1], row[3], row[-1]) for row in rows] == [(sampler, str(kills), "ok") for _ in jobs.split(",")]
