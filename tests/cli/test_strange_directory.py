"""What lies in the working directory is data: none of it runs, here or in a child. test_dashboard.py has its pages,
and a search with two workers there that always runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from effort import LONG, sample
from traps import environment, lay_traps

SEARCH = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--trials", "4", "--name", "c",
          "--store", "trials.db")  # fmt: skip


@LONG
@pytest.mark.parametrize("jobs", sample(["2", "1"]))
def test_a_search_its_workers_and_its_mirror_run_no_code_of_the_working_directory(tmp_path: Path, jobs: str) -> None:
    command, sprung = lay_traps(Path.cwd(), tmp_path)
    done = subprocess.run(
        [*command, *SEARCH, "--jobs", jobs, "--mlflow", "none"],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the mirror lags" not in done.stderr
    mirrored = subprocess.run(
        [*command, "mlflow", "sync", "--store", "trials.db"], capture_output=True, text=True, env=environment(),
        check=False,
    )  # fmt: skip
    assert mirrored.returncode == 0, mirrored.stderr
    assert not sprung.exists()
