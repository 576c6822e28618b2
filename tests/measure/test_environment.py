from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import flywheel
from flywheel.ir.version import IR_VERSION
from flywheel.measure.environment import capture_environment, git_commit


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_versions_are_those_installed() -> None:
    environment = capture_environment()
    assert environment.ir_version == IR_VERSION
    assert environment.python == ".".join(map(str, sys.version_info[:3]))
    assert (environment.optuna, environment.sqlalchemy) == (version("optuna"), version("sqlalchemy"))
    assert environment.host


def test_capturing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from flywheel.measure.environment import capture_environment; capture_environment(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'optuna', 'sqlalchemy', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(flywheel.__file__).parents[1], timeout=60)
    assert done.returncode == 0


def test_a_checkout_has_its_commit_and_says_when_it_was_edited(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-am", "release", "v1")
    commit = git_commit(tmp_path)
    assert commit is not None and re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "a").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_a_folder_inside_somebody_elses_checkout_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "site-packages").mkdir()
    assert git_commit(tmp_path / "site-packages") is None


def test_a_machine_without_git_and_gpu_tools_reports_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = capture_environment()
    assert (environment.commit, environment.driver, environment.gpu) == (None, None, None)


def test_the_gpu_is_the_first_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.1, NVIDIA H200'\necho '580.1, NVIDIA L4'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environment = capture_environment()
    assert (environment.driver, environment.gpu) == ("580.1", "NVIDIA H200")
