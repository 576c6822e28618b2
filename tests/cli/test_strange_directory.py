"""What lies in the working directory is data: none of it runs, here or in a child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from effort import sample

ROOT = Path(__file__).parents[2]
NAMES = ("alembic", "click", "flywheel", "mlflow", "multiprocessing", "numpy", "optuna", "pickle", "signal", "socket",
         "sqlalchemy", "uvicorn", "gunicorn", "flask")  # fmt: skip
TRAP = "import pathlib\npathlib.Path({mark!r}).write_text(__name__)\nraise SystemExit('trapped')\n"
SEARCH = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--trials", "4", "--name", "c",
          "--store", "trials.db")  # fmt: skip


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The installed command, in a working directory full of traps; `sprung` is what a trap leaves."""
    script = tmp_path / "bin" / "flywheel"
    script.parent.mkdir()
    script.write_text("from flywheel.__main__ import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n")
    for name in NAMES:
        Path(f"{name}.py").write_text(TRAP.format(mark=str(tmp_path / "sprung")))
    return [sys.executable, str(script)]


def environment() -> dict[str, Any]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def command_lines() -> list[bytes]:
    """What everybody on the machine can read of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes())
    return found


@pytest.mark.parametrize("jobs", sample(["2", "1"]))
def test_a_search_its_workers_and_its_mirror_run_no_code_of_the_working_directory(
    command: list[str], tmp_path: Path, jobs: str
) -> None:
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
    assert not (tmp_path / "sprung").exists()


def test_a_dashboard_runs_no_code_of_the_working_directory_and_tells_nobody_its_password(
    command: list[str], tmp_path: Path
) -> None:
    """A password of a tracking database is in no process's command line."""
    tracking = f"sqlite:///{tmp_path}/s3cret.db"
    subprocess.run([*command, *SEARCH, "--jobs", "1"], capture_output=True, env=environment(), check=True)
    given = {**environment(), "FLYWHEEL_DASHBOARD_TRACKING_URI": tracking}
    with subprocess.Popen(
        [*command, "dashboard", "--store", "trials.db", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=given,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        lines = command_lines()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert json.loads(line)["url"].startswith("http://127.0.0.1:"), said
    assert any(b"mlflow\0server" in each for each in lines)
    assert not [each for each in lines if b"s3cret" in each]
    assert not (tmp_path / "sprung").exists()
