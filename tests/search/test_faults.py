"""Faults under searches that run as commands; the table of a long run is results/faults.txt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from effort import FULL, LONG, examples

ROOT = Path(__file__).parents[2]
ONLY = () if FULL else ("--only", "kill sqlite,shared postgresql,stopped")
"""Each kind of fault once; in the full form on each kind of store."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--short", "--kills", str(examples(2)), "--trials", "12", *ONLY), marks=LONG),
    ],
    ids=["long", "short"],
)
def test_whatever_fails_no_row_is_lost_or_repeated_and_nothing_hangs(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "faults.py"), *options],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    rows = table[[line[:1] for line in table].index(["fault"]) + 1 :]  # behind the columns' names
    assert {"kill", "shared", "stopped"} <= {row[0] for row in rows}
    assert {row[-1] for row in rows} == {"ok"}, done.stdout
