from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SKIPPING = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    pytest.skip("no GPU here")

def test_elsewhere():
    pytest.skip("another reason")
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "effort.py"):
        shutil.copy(TESTS / name, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\npythonpath = .\n", encoding="utf-8")
    (folder / "test_skips.py").write_text(SKIPPING, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_gpu_tests_may_skip(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 skipped" in done.stdout


def test_required_gpu_fails_the_skips_of_gpu_tests_only(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--require-gpu")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 skipped" in done.stdout
    assert "--require-gpu: Skipped: no GPU here" in done.stdout
