"""Identifies a machine's card. A GPU is a target only if its name, SMs and memory agree with the target's record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from flywheel.ir.target import DRIVER_NAMES, TARGETS, GpuTarget

GENERIC: Final = "generic"
"""The name of the record of this machine's GPU, and the beginning of the names of cards without a datasheet here."""

_MEMORY_OFF: Final = 0.1
"""Allowed relative difference of the driver's memory from the datasheet's: ECC and the driver take some."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of a machine: the driver's name, SMs and bytes of memory; None where unknown."""

    name: str
    num_sms: int | None = None
    total_bytes: int | None = None

    def __str__(self) -> str:
        facts = [] if self.num_sms is None else [f"{self.num_sms} SMs"]
        facts += [] if self.total_bytes is None else [f"{self.total_bytes / 1e9:.1f} GB"]
        return f"{self.name} ({', '.join(facts)})" if facts else self.name


def target_of(device: Device) -> GpuTarget | None:
    """The record of a card; None where there is none, such as for a slice of a card."""
    name = _bare(device.name)
    return next(
        (
            target
            for target in TARGETS.values()
            if name in map(_bare, DRIVER_NAMES[target.name]) and _agrees(device, target)
        ),
        None,
    )


def is_target(device: Device, target: GpuTarget) -> bool:
    """Whether a card is this target, which may be a generic one."""
    if target.name.startswith(f"{GENERIC}-"):
        return target.name.startswith(f"{GENERIC}-{_slug(device.name)}-") and _agrees(device, target)
    found = target_of(device)
    return found is not None and found.name == target.name


def generic_name(device: Device) -> str:
    """The name of the record of a card without a datasheet here. Cards with other SMs or memory have other names."""
    assert device.num_sms is not None
    assert device.total_bytes is not None
    return f"{GENERIC}-{_slug(device.name)}-{device.num_sms}sm-{round(device.total_bytes / 2**30)}gib"


def _agrees(device: Device, target: GpuTarget) -> bool:
    if device.num_sms is not None and device.num_sms != target.num_sms:
        return False
    return device.total_bytes is None or abs(device.total_bytes / target.hbm_bytes - 1.0) <= _MEMORY_OFF


def _bare(name: str) -> str:
    return " ".join(word for word in name.lower().split() if word not in ("nvidia", "geforce"))


def _slug(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", _bare(name)))
