"""Waits until GPUs of this machine are quiet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from time import monotonic

from flywheel.measure.tenants import Attendant, GpuPresence, together
from flywheel.vm.gpu.nvml import read_presence
from flywheel.vm.watching import tell


def attendant(gpus: Sequence[str], pause: Callable[[float], bool] | None = None) -> Attendant:
    """What waits until the GPUs, by PCI address or UUID, are quiet, and says so on stderr. This process or a descendant
    must be on them.

    `pause` is as `Attendant` takes it; without it, this thread sleeps.
    """

    def read() -> GpuPresence:
        return together([read_presence(gpu) for gpu in gpus] or [GpuPresence()])

    return Attendant(read, tell, pause or Event().wait, monotonic)
