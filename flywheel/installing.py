"""The distribution that flywheel is installed from, and the command lines that install more of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

DISTRIBUTION: Final = "flywheel-megakernel"
"""Name on package indexes. There, `flywheel` is another project."""
CUDA_13_DRIVER: Final = 580
"""First driver branch that runs CUDA 13. Source: NVIDIA, CUDA compatibility, "Minor version compatibility"."""

EXTRAS: Final = {
    "torch": "torch", "safetensors": "hf", "tokenizers": "hf", "huggingface_hub": "hf", "fastapi": "serve",
    "uvicorn": "serve", "prometheus_client": "serve",
}  # fmt: skip
"""Module -> the extra that installs it."""

_SOURCE_ROOT: Final = Path(__file__).resolve().parents[1]
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")


def install_line(*extras: str) -> str:
    """The command line that adds `extras` to this installation, from the same directory, URL or index.

    The extra `cuda` becomes `cuda12` where this machine's driver is older than CUDA 13.
    """
    chosen = [cuda_extra(driver_here()) if extra == "cuda" else extra for extra in extras]
    wanted = f"[{','.join(dict.fromkeys(chosen))}]" if chosen else ""
    return f"pip install {_source(wanted)}"


def lacking(what: str, modules: Sequence[str]) -> str | None:
    """The line that says which `modules` of EXTRAS `what` needs and lacks, and how to install them all; None where none
    is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return None
    named = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
    return f"{what} needs {named}: {install_line(*(EXTRAS[module] for module in missing))}"


def cuda_extra(driver: str | None) -> str:
    """The extra for a driver's version: `cuda` or `cuda12`; for None, which means no driver, `cuda`."""
    branch = (driver or "").partition(".")[0]
    return "cuda12" if branch.isdecimal() and int(branch) < CUDA_13_DRIVER else "cuda"


def _source(wanted: str) -> str:
    """The argument for pip, with the extras `wanted`, and its options."""
    named = f"'{DISTRIBUTION}{wanted}'" if wanted else DISTRIBUTION
    try:
        recorded = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:  # a source tree that is not installed
        return _directory(_SOURCE_ROOT, True, wanted) or named
    origin = json.loads(recorded) if recorded is not None else {}
    url = origin.get("url", "")
    if "dir_info" in origin:
        return _directory(Path(unquote(urlsplit(url).path)), origin["dir_info"].get("editable", False), wanted) or named
    if "vcs_info" in origin:
        revision = origin["vcs_info"].get("requested_revision")
        url = f"{origin['vcs_info']['vcs']}+{url}" + (f"@{revision}" if revision else "")
    return shlex.quote(f"{DISTRIBUTION}{wanted} @ {url}") if url else named


def _directory(folder: Path, editable: bool, wanted: str) -> str | None:
    """A source tree as an argument for pip; None where the directory is gone."""
    if not (folder / "pyproject.toml").is_file():
        return None
    quoted = f"'{folder}{wanted}'" if wanted and "'" not in str(folder) else shlex.quote(f"{folder}{wanted}")
    return f"--editable {quoted}" if editable else quoted


def driver_here() -> str | None:
    """This machine's NVIDIA driver, `535.104.05`; None where the kernel has none loaded."""
    try:
        words = _DRIVER_FILE.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[:3].isdecimal() and word.count(".") >= 1), None)
