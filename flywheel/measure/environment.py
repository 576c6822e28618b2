"""Where a result came from: versions, machine and commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from flywheel.ir.version import IR_VERSION
from flywheel.measure.device import Device
from flywheel.version import VERSION

_SOURCE_ROOT: Final = Path(__file__).resolve().parents[2]
_ASKED: Final = "driver_version,name,uuid,memory.total"
_COMMAND_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Environment:
    """Software and machine of one run; None for what is not installed or not there.

    `commit` ends in `-dirty` where tracked files differ from it, or what FLYWHEEL_COMMIT says of a copy that git knows
    nothing of; `driver` and `gpu` are those of the first NVIDIA GPU that a process here may use. `nvrtc` and `kernels`,
    the compiler of what is measured and a digest of its sources, are None where nothing is measured.
    """

    flywheel_version: str
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
    gpu_memory_bytes: int | None = None

    @property
    def device(self) -> Device | None:
        """The GPU, as far as this tells; None where there is none."""
        return None if self.gpu is None else Device(self.gpu, None, self.gpu_memory_bytes)


def capture_environment() -> Environment:
    """The environment of this process. Asks git and nvidia-smi where they are there; imports nothing heavy."""
    driver, device = _driver_and_gpu()
    return Environment(
        flywheel_version=VERSION,
        ir_version=IR_VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=os.cpu_count(),
        host=platform.node(),
        commit=os.environ.get("FLYWHEEL_COMMIT") or git_commit(_SOURCE_ROOT),
        optuna=_version("optuna"),
        sqlalchemy=_version("sqlalchemy"),
        torch=_version("torch"),
        driver=driver,
        gpu=None if device is None else device.name,
        gpu_memory_bytes=None if device is None else device.total_bytes,
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


def list_gpus() -> list[tuple[str, Device]]:
    """(id for CUDA_VISIBLE_DEVICES, what it is) of each NVIDIA GPU that a process here may use."""
    return [(gpu, device) for _, device, gpu in _gpus() if gpu and device is not None]


def _driver_and_gpu() -> tuple[str | None, Device | None]:
    for driver, device, _ in _gpus():
        return driver or None, device
    return None, None


def _gpus() -> list[tuple[str, Device | None, str]]:
    """(driver, GPU, id) of each; nvidia-smi does not tell its SMs."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed == "":
        return []
    executable = shutil.which("nvidia-smi")
    found = []
    for line in "" if executable is None else _listing(executable, allowed).splitlines():
        driver, name, gpu, mebibytes = [*line.split(", "), "", "", ""][:4]
        total_bytes = int(mebibytes) * 2**20 if mebibytes.isdecimal() else None
        found.append((driver, Device(name, None, total_bytes) if name else None, gpu))
    return found


@cache
def _listing(executable: str, allowed: str | None) -> str:
    """What the driver's tool says, which takes up to a second: asked once, since a process's GPUs stay the same."""
    chosen = [] if allowed is None else [f"--id={allowed}"]
    return _output(executable, *chosen, f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits") or ""


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
