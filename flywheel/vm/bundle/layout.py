"""What a bundle is called and how it lies in files, for who writes and who reads one. Source: docs/bundle.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flywheel.vm.abi import STRUCTS, numpy_struct

FORMAT: Final = "flywheel-bundle"
VERSION: Final = 1
"""Raised when an older reader would misread a bundle; added fields do not raise it."""

KERNEL: Final = "kernel.cubin"
TABLES: Final = "tables.bin"
LABELS: Final = "labels.json"

ALIGNMENT: Final = 256
"""Of each table in TABLES."""

ELEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "buffers": "amk_buffer_t", "instructions": "amk_instruction_t", "queues": "int32_t", "steps": "amk_step_t",
        "segments": "amk_segment_t", "segment_buffers": "int32_t", "streams": "int32_t", "floats": "float",
    }
)  # fmt: skip
"""Table -> what it is an array of."""

_NUMBERS: Final = {"int32_t": "<i4", "float": "<f4"}


def element_type(name: str) -> np.dtype[Any]:
    """The numpy type of what a table is an array of."""
    return np.dtype(_NUMBERS[name]) if name in _NUMBERS else numpy_struct(name)


def structs_digest() -> str:
    """Of all structs that tables and kernels share: another digest is another layout."""
    members = {name: [(each.type, each.name, each.count) for each in found] for name, found in STRUCTS.items()}
    return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Of all that a manifest says but its digest."""
    said = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
