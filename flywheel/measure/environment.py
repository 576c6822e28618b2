"""Where a result came from: versions, machine and commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from flywheel.ir.version import IR_VERSION

_SOURCE_ROOT: Final = Path(__file__).resolve().parents[2]
_COMMAND_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Environment:
    """Software and machine of one run; None for what is not installed or not there.

    `flywheel_version` is None in a source tree that was never installed; `commit` ends in `-dirty` where tracked files
    differ from it; `driver` and `gpu` are those of the first NVIDIA GPU that a process here may use. `nvrtc` and
    `kernels`, the compiler of what is measured and a digest of its sources, are None where nothing is measured.
    """

    flywheel_version: str | None
    ir_version: str
    python: str
    platform: str
    cpu_count: int | None
    host: str
    commit: str | None
    optuna: str | None
    sqlalchemy: str | None
    torch: str | None
    driver: str | None
    gpu: str | None
    nvrtc: str | None = None
    kernels: str | None = None


def capture_environment() -> Environment:
    """The environment of this process. Asks git and nvidia-smi where they are there; imports nothing heavy."""
    driver, gpu = _driver_and_gpu()
    return Environment(
        flywheel_version=_version("flywheel"),
        ir_version=IR_VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=os.cpu_count(),
        host=platform.node(),
        commit=git_commit(_SOURCE_ROOT),
        optuna=_version("optuna"),
        sqlalchemy=_version("sqlalchemy"),
        torch=_version("torch"),
        driver=driver,
        gpu=gpu,
    )


def git_commit(root: Path) -> str | None:
    """Full commit of the checkout whose top is `root`, with `-dirty` where it was edited; None if it is no checkout."""
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def list_gpus() -> list[tuple[str, str]]:
    """(id for CUDA_VISIBLE_DEVICES, name) of each NVIDIA GPU that a process here may use."""
    return [(gpu, name) for _, name, gpu in _gpus() if gpu and name]


def _driver_and_gpu() -> tuple[str | None, str | None]:
    for driver, name, _ in _gpus():
        return driver or None, name or None
    return None, None


def _gpus() -> list[tuple[str, str, str]]:
    """(driver, name, id) of each."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed == "":
        return []
    chosen = [] if allowed is None else [f"--id={allowed}"]
    listing = _output("nvidia-smi", *chosen, "--query-gpu=driver_version,name,uuid", "--format=csv,noheader")
    found = []
    for line in (listing or "").splitlines():
        driver, name, gpu = [*line.split(", "), "", ""][:3]
        found.append((driver, name, gpu))
    return found


def _output(program: str, *arguments: str) -> str | None:
    """Standard output of a command; None where it is missing, fails, says nothing or takes too long."""
    executable = shutil.which(program)
    if executable is None:
        return None
    try:
        done = subprocess.run(
            [executable, *arguments], capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
