"""The origin of a result: versions, machine and commit."""

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
    """The software and machine of one run; None for what is not installed or not present.

    `commit` ends in `-dirty` if tracked files differ from it. In a copy without git it is FLYWHEEL_COMMIT. `driver` and
    `gpu` are those of the first NVIDIA GPU that this process may use. `nvrtc` and `kernels`, the compiler of the
    measured kernels and a digest of their sources, are None if nothing is measured.
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
        """The GPU, as far as these fields tell; None where there is none."""
        return None if self.gpu is None else Device(self.gpu, None, self.gpu_memory_bytes)


def capture_environment() -> Environment:
    """The environment of this process. It asks git and nvidia-smi if they are installed, and imports nothing heavy."""
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
    """The full commit of the checkout whose top is `root`, with `-dirty` if it was edited; None if it is no
    checkout."""
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def list_gpus() -> list[tuple[str, Device]]:
    """(id for CUDA_VISIBLE_DEVICES, device) of each NVIDIA GPU that a process here may use."""
    return [(gpu, device) for _, device, gpu in _gpus() if gpu and device is not None]


def _driver_and_gpu() -> tuple[str | None, Device | None]:
    for driver, device, _ in _gpus():
        return driver or None, device
    return None, None


def _gpus() -> list[tuple[str, Device | None, str]]:
    """(driver, GPU, id) of each GPU. nvidia-smi does not tell the SMs."""
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
    """The output of the driver's tool. It takes up to a second and is asked once, since a process's GPUs stay the
    same."""
    chosen = [] if allowed is None else [f"--id={allowed}"]
    return _output(executable, *chosen, f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits") or ""


def _output(program: str, *arguments: str) -> str | None:
    """The standard output of a command; None where it is missing, fails, is empty or takes too long."""
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
