"""Is the GPU that a campaign wants on this machine?"""

from __future__ import annotations

import re
from itertools import pairwise

from flywheel.errors import NoGpuError
from flywheel.ir import GpuTarget


def settle_measure(wanted: str, target: GpuTarget, present: str | None) -> str:
    """How latencies are got: "predict", unless the GPU is here and its VM too. `present` names this machine's GPU.

    Raises NoGpuError where `cuda` cannot be had, and where another GPU is present and nobody asked for predictions.
    """
    if wanted == "predict":
        return "predict"
    if wanted == "cuda":
        where = f"this machine has {present}" if present else "this machine has no GPU"
        if present is None or not is_target(present, target):
            raise NoGpuError(f"--measure cuda needs an {target.name}: {where}")
        raise NoGpuError(f"--measure cuda: this version has no CUDA VM yet; {target.name} latencies can be predicted")
    if present is not None and not is_target(present, target):
        raise NoGpuError(f"--gpu {target.name}: this machine has {present}; --measure predict searches without it")
    return "predict"


def is_target(device: str, target: GpuTarget) -> bool:
    """Whether a device name, as its driver gives it, is this target: "NVIDIA GeForce RTX 4090" is rtx4090."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return target.name in {*words, *(first + second for first, second in pairwise(words))}
