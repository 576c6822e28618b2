"""Is the GPU that a campaign wants on this machine?"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from flywheel.errors import NoGpuError, UsageError
from flywheel.installing import install_line
from flywheel.ir import TARGETS, GpuTarget
from flywheel.measure.device import GENERIC, Device, is_target, target_of
from flywheel.measure.environment import list_gpus

DEFAULT_GPU: Final = "h100"
"""The GPU that programs for the reference VM are lowered for, unless somebody names one."""

_MEASURES: Final = ("torch", "cuda.bindings", "cuda.core", "pynvml")
"""What measuring imports."""


def settle_measure(
    wanted: str, target: GpuTarget, present: Device | None, missing: Sequence[str], ranks: int = 1, there: int = 1
) -> str:
    """Whether a campaign measures or predicts: "cuda" or "predict".

    `wanted` is auto, predict or cuda; `present` is this machine's GPU; `missing` are the packages that measuring lacks.
    A program takes `ranks` GPUs, and `there` of the target's kind are here, where one is. Auto measures where the GPU
    is `target` and no package is missing. Raises NoGpuError where `cuda` is wanted and the GPUs are not here, and where
    other or fewer GPUs are here and nobody asked for predictions. Raises UsageError where `cuda` is wanted and only
    packages are missing.
    """
    if wanted == "predict":
        return "predict"
    here = present is not None and is_target(present, target)
    if wanted == "cuda" and not here:
        where = f"this machine has {present}" if present else "this machine has no GPU"
        raise NoGpuError(f"--measure cuda needs an {target.name}: {where}")
    if wanted == "cuda" and missing:
        raise UsageError(f"--measure cuda needs {' and '.join(missing)}: {install_line('cuda', 'torch')}")
    if present is not None and not here:
        raise NoGpuError(f"--gpu {target.name}: this machine has {present}; --measure predict searches without it")
    if here and ranks > there:
        asked = "--measure cuda" if wanted == "cuda" else f"--gpu {ranks}x{target.name}"
        more = "" if wanted == "cuda" else "; --measure predict searches without them"
        raise NoGpuError(f"{asked} needs {ranks} {target.name}: this machine has {there}{more}")
    return "cuda" if here and not missing else "predict"


def gpus_here(target: GpuTarget) -> list[tuple[str, Device]]:
    """This machine's GPUs of the target's kind, as `list_gpus` has them."""
    return [(gpu, device) for gpu, device in list_gpus() if is_target(device, target)]


def missing_modules() -> list[str]:
    """The modules that measuring imports and that are not installed."""
    return [module for module in _MEASURES if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def default_gpu(who: str) -> str:
    """The name of this machine's first GPU; `generic` for a GPU without a record.

    Raises UsageError, which names the command `who`, where the machine has no GPU.
    """
    for _, device in list_gpus():
        target = target_of(device)
        return GENERIC if target is None else target.name
    raise UsageError(f"{who}: this machine has no NVIDIA GPU; give --gpu, one of {', '.join(TARGETS)}")


def target_here(device: Device) -> GpuTarget:
    """The record of this process's GPU: its datasheet's, else a generic one. Raises NoGpuError."""
    from flywheel.vm.gpu.devices import describe_gpu

    return target_of(device) or describe_gpu()[1]


def gpu_of(device: str) -> str:
    """The GPU that programs for a device are lowered for, unless somebody names one.

    For `cuda` it is this machine's GPU, for other devices DEFAULT_GPU. Raises NoGpuError where `cuda` has no GPU.
    """
    if device != "cuda":
        return DEFAULT_GPU
    from flywheel.vm.gpu.driver import open_gpu

    gpu = open_gpu()
    return target_here(Device(gpu.name, gpu.num_sms, gpu.total_bytes)).name
