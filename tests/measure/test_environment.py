from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import flywheel
from flywheel.ir.version import IR_VERSION
from flywheel.measure.device import Device
from flywheel.measure.environment import capture_environment, git_commit, list_gpus

H200 = Device("NVIDIA H200", None, 143771 * 2**20)
L4 = Device("NVIDIA L4", None, 23034 * 2**20)


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


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's tool that lists two GPUs, or the second one where `--id=GPU-b` asks for it."""
    tool = tmp_path / "nvidia-smi"
    listed = (("H200", "a", 143771), ("L4", "b", 23034))
    first, second = (f"echo '580.1, NVIDIA {name}, GPU-{letter}, {size}'" for name, letter, size in listed)
    tool.write_text(f"#!/bin/sh\n[ $1 = --id=GPU-b ] || {first}\n{second}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_the_gpu_is_the_first_that_the_driver_lists() -> None:
    environment = capture_environment()
    assert (environment.driver, environment.gpu) == ("580.1", "NVIDIA H200")
    assert environment.device == H200
    assert list_gpus() == [("GPU-a", H200), ("GPU-b", L4)]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("allowed", "driver", "gpus"),
    [("GPU-b", "580.1", [("GPU-b", L4)]), ("", None, [])],
    ids=["second", "none"],
)
def test_a_gpu_that_this_process_may_not_use_is_not_here(
    allowed: str, driver: str | None, gpus: list[tuple[str, Device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert list_gpus() == gpus
    assert capture_environment().driver == driver


def test_a_copy_has_the_commit_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.measure.environment._SOURCE_ROOT", tmp_path)
    assert capture_environment().commit is None
    monkeypatch.setenv("FLYWHEEL_COMMIT", "f1a33a6")
    assert capture_environment().commit == "f1a33a6"
