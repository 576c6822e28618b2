"""Names and file layout of a bundle, for writers and readers. Source: docs/bundle.md."""

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
"""The number rises when an older reader would misread a bundle. An added field leaves it."""

KERNEL: Final = "kernel.cubin"
TABLES: Final = "tables.bin"
LABELS: Final = "labels.json"

ALIGNMENT: Final = 256
"""Alignment of each table in TABLES, in bytes."""

ELEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "buffers": "amk_buffer_t", "instructions": "amk_instruction_t", "queues": "int32_t", "steps": "amk_step_t",
        "segments": "amk_segment_t", "segment_buffers": "int32_t", "streams": "int32_t", "floats": "float",
    }
)  # fmt: skip
"""Table -> its element type."""

_NUMBERS: Final = {"int32_t": "<i4", "float": "<f4"}


def element_type(name: str) -> np.dtype[Any]:
    """The numpy type of a table's elements."""
    return np.dtype(_NUMBERS[name]) if name in _NUMBERS else numpy_struct(name)


def structs_digest() -> str:
    """The digest of all structs that tables and kernels share. Another digest means another layout."""
    members = {name: [(each.type, each.name, each.count) for each in found] for name, found in STRUCTS.items()}
    return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """The digest of a manifest without its own entry `digest`."""
    said = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
