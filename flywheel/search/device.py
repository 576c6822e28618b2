"""Is the GPU that a campaign wants on this machine?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Final

from flywheel.errors import NoGpuError, UsageError
from flywheel.ir import GpuTarget

_MEASURES: Final = ("torch", "cuda.bindings", "cuda.core", "pynvml")
"""What measuring imports."""


def settle_measure(wanted: str, target: GpuTarget, present: str | None, missing: Sequence[str]) -> str:
    """How latencies are got: "predict", or "cuda" where the GPU is here and nothing is `missing` to measure on it.

    `present` names this machine's GPU. Raises NoGpuError where `cuda` cannot be had, and where another GPU is present
    and nobody asked for predictions; UsageError where `cuda` is asked for and only packages are missing.
    """
    if wanted == "predict":
        return "predict"
    here = present is not None and is_target(present, target)
    if wanted == "cuda" and not here:
        where = f"this machine has {present}" if present else "this machine has no GPU"
        raise NoGpuError(f"--measure cuda needs an {target.name}: {where}")
    if wanted == "cuda" and missing:
        raise UsageError(f"--measure cuda needs {' and '.join(missing)}: pip install 'flywheel[cuda,torch]'")
    if present is not None and not here:
        raise NoGpuError(f"--gpu {target.name}: this machine has {present}; --measure predict searches without it")
    return "cuda" if here and not missing else "predict"


def missing_modules() -> list[str]:
    """What measuring imports and is not installed."""
    return [module for module in _MEASURES if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def is_target(device: str, target: GpuTarget) -> bool:
    """Whether a device name, as its driver gives it, is this target: "NVIDIA GeForce RTX 4090" is rtx4090."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return target.name in {*words, *(first + second for first, second in pairwise(words))}
