"""The manifest of a bundle: its names and file layout, for writers and readers, and a check that it has everything that
readers rely on. A digest only shows that a manifest is unchanged, not that it is correct. Source: docs/bundle.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, get_type_hints

import numpy as np

from flywheel.ir import Buffer, BufferKind, GpuTarget
from flywheel.plan import KernelVariant
from flywheel.plan.features import FEATURES as KNOWN
from flywheel.vm.abi import STRUCTS, Layout, numpy_struct
from flywheel.vm.gpu.nvrtc import EntryUsage
from flywheel.vm.pack import PackedProgram

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

_PLAIN: Final = {"int32_t": "<i4", "float": "<f4"}


def element_type(name: str) -> np.dtype[Any]:
    """The numpy type of a table's elements."""
    return np.dtype(_PLAIN[name]) if name in _PLAIN else numpy_struct(name)


def structs_digest() -> str:
    """The digest of all structs that tables and kernels share. Another digest means another layout."""
    members = {name: [(each.type, each.name, each.count) for each in found] for name, found in STRUCTS.items()}
    return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """The digest of a manifest without its own entry `digest`."""
    said = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_MOST: Final = 2**48
"""Largest number, and largest buffer in bytes. Its product with an element's size fits into 64 bits."""

WEIGHT_KINDS: Final = (BufferKind.WEIGHT, BufferKind.CONST)
_HINTS: Final[Mapping[Any, type]] = {tuple[int, ...]: list}


def _members(kind: type) -> dict[str, Any]:
    return {name: _HINTS.get(wanted, wanted) for name, wanted in get_type_hints(kind).items()}


FEATURES: Final = "features"
"""A member of kernel and variant that is only there where it is not empty."""

PIECES: Final = "pieces"
"""A member of weights that is only there where checkpoints store other tensors than programs read."""

_FILE: Final = {"bytes": int, "sha256": str}
_NUMBERS: Final = ("n_counters", "workspace_stride", "pass_blocks", "set_stride", "awaited_bytes")

_WANTED: Final[Mapping[str, Any]] = {
    "abi": str,
    "model": {"spec": {"name": str, "vocab": int}, "context": int, "batch": int},
    "schedule": {"words": str},
    "target": _members(GpuTarget),
    "kernel": {
        "arch": str, "key": str, "nvrtc": str, "threads": int, "matrix_warps": int, "dtype": str, "rows": int,
        "formats": list, "entries": dict.fromkeys(("megakernel", "pack_matrix", "advance_rows"), _members(EntryUsage)),
    },
    "launch": {"grid": int, "last_position": int},
    "variant": {name: kind for name, kind in _members(KernelVariant).items() if name != FEATURES},
    "tables": {name: {"offset": int, "count": int} for name in ELEMENTS},
    "program": {"numbers": dict.fromkeys(_NUMBERS, int)},
    "buffers": list,
    "weights": {"tensors": dict},
    "files": {KERNEL: _FILE, TABLES: _FILE, LABELS: _FILE},
}  # fmt: skip
"""Name -> its type, or the names of its entries."""

_BUFFER: Final = {"id": int, "name": str, "kind": str, "dtype": str, "shape": list, "space": str}
_CODED: Final = {"row": int, "coding": int, "scales": int, "group": int, "rows_per_scale": int}
_TENSOR: Final = {"dtype": str, "shape": list, "samples": str}
_PIECE: Final = {"tensor": str, "whole": int, "first": int, "heads": list}


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the place, for a missing entry, an entry of a wrong type, and a number out of
    range."""
    _check("", manifest, _WANTED)
    nvrtc = manifest["kernel"]["nvrtc"]
    if not nvrtc.partition(".")[0].isdecimal():
        raise ValueError(f"kernel.nvrtc: {nvrtc[:60]!r} is not a version")
    for name in ("kernel", "variant"):
        _check_each(f"{name}.formats", manifest[name]["formats"])
        if any(each not in KNOWN for each in manifest[name].get(FEATURES, ())):
            raise ValueError(f"{name}.{FEATURES}: not some of {', '.join(KNOWN)}")
    for row, buffer in enumerate(manifest["buffers"]):
        _check(f"buffers.{row}", buffer, _BUFFER)
        _check_each(f"buffers.{row}.shape", buffer["shape"])
        for name, wanted in (("offset", int), ("tensor", str)):
            if name in buffer:
                _check(f"buffers.{row}.{name}", buffer[name], wanted)
    _check("coded", manifest.get("coded", []), list)
    for place, coded in enumerate(manifest.get("coded", [])):
        _check(f"coded.{place}", coded, _CODED)
        _check_coded(f"coded.{place}", coded, len(manifest["buffers"]))
    _check_weights(manifest["weights"])
    for name, about in manifest["files"].items():
        _check(f"files.{name}", about, _FILE)


def _check_weights(weights: Mapping[str, Any]) -> None:
    for name, tensor in weights["tensors"].items():
        _check(f"weights.tensors.{name}", tensor, _TENSOR)
        _check_each(f"weights.tensors.{name}.shape", tensor["shape"])
    _check(f"weights.{PIECES}", weights.get(PIECES, {}), dict)
    for name, piece in weights.get(PIECES, {}).items():
        _check(f"weights.{PIECES}.{name}", piece, _PIECE)
        _check_each(f"weights.{PIECES}.{name}.heads", piece["heads"])


def _check_coded(where: str, coded: Mapping[str, Any], rows: int) -> None:
    zeros = coded.get("zeros")
    if type(zeros) is not int or not -1 <= zeros < rows:
        raise ValueError(f"{where}.zeros: {str(zeros)[:60]} is not in -1..{rows - 1}")
    for name in ("row", "scales"):
        if coded[name] >= rows:
            raise ValueError(f"{where}.{name}: {coded[name]} is not in 0..{rows - 1}")
    if not coded["group"] or not coded["rows_per_scale"]:
        raise ValueError(f"{where}: a group or rows_per_scale of 0")


def check_tables(manifest: Mapping[str, Any], packed: PackedProgram) -> None:
    """Raises ValueError if a manifest's tables, buffers and model do not match."""
    buffers, rows = packed.program.buffers, len(packed.program.buffers)
    context, batch = manifest["model"]["context"], manifest["model"]["batch"]
    sizes = {"queues": manifest["launch"]["grid"] + 1, "buffers": rows, "segments": len(packed.segment_buffers)}
    for name, size in sizes.items():
        if len(getattr(packed, name)) != size:
            raise ValueError(f"tables.{name}: {len(getattr(packed, name))} rows, not {size}")
    if len(packed.segment_buffers) and not 0 <= packed.segment_buffers.min() <= packed.segment_buffers.max() < rows:
        raise ValueError(f"tables.segment_buffers: names a buffer that is not one of {rows}")
    shapes = {"token_id": (batch,), "position": (batch,), "next_token": (batch,),
              "logits": (batch, manifest["model"]["spec"]["vocab"])}  # fmt: skip
    found = {each.name: tuple(each.shape) for each in buffers}
    wrong = next((name for name, shape in shapes.items() if found.get(name) != shape), None)
    if wrong is not None:
        raise ValueError(f"buffers: {wrong} is {found.get(wrong)}, not {shapes[wrong]}")
    if not 0 < context <= manifest["launch"]["last_position"] + 1:
        raise ValueError(f"model.context: {context} is not in 1..{manifest['launch']['last_position'] + 1}")
    for row, buffer in enumerate(buffers):
        _check_buffer(manifest, packed, row, f"buffers.{row}: {buffer.name}")


def _check_buffer(manifest: Mapping[str, Any], packed: PackedProgram, row: int, where: str) -> None:
    buffer, arena = packed.program.buffers[row], packed.arena
    if buffer.nbytes >= _MOST:
        raise ValueError(f"{where} has {buffer.nbytes:,} bytes")
    if buffer.kind in WEIGHT_KINDS:
        _check_source(manifest["weights"], buffer, where)
        if packed.buffers["layout"][row] not in _layouts_of(packed, row):
            raise ValueError(f"{where} has layout {packed.buffers['layout'][row]}, which it cannot have")
    elif buffer.kind is BufferKind.KV_CACHE:
        if not buffer.shape or buffer.shape[0] < manifest["model"]["context"]:
            raise ValueError(f"{where} has no {manifest['model']['context']} positions")
    elif not 0 <= arena.offsets.get(row, -1) <= arena.nbytes - buffer.nbytes:
        raise ValueError(f"{where} is not in the arena of {arena.nbytes} bytes")


def _check_source(weights: Mapping[str, Any], buffer: Buffer, where: str) -> None:
    name = buffer.source or buffer.name
    piece = weights.get(PIECES, {}).get(name)
    if (name if piece is None else piece["tensor"]) not in weights["tensors"]:
        raise ValueError(f"{where} is no tensor of weights.tensors")
    if piece is None:
        return
    rows, heads = buffer.shape[0] if buffer.shape else 0, piece["heads"]
    if not rows or piece["first"] + rows > piece["whole"]:
        raise ValueError(f"{where} is not within the {piece['whole']} rows of {piece['tensor']}")
    if heads and (sorted(heads) != list(range(len(heads))) or rows % len(heads)):
        raise ValueError(f"{where} has no heads of {len(heads)} rows, or its heads lack some")


def _layouts_of(packed: PackedProgram, row: int) -> tuple[Layout, ...]:
    """The layouts that a weight can have."""
    if row in packed.coded:
        return (Layout.UNITS,)
    if any(row in (each.scales, each.zeros) for each in packed.coded.values()):
        return (Layout.ROW_SCALES, Layout.IN_UNITS)
    return (Layout.ROWS, Layout.FRAGMENTS)


def _check_each(where: str, numbers: Sequence[object]) -> None:
    for number in numbers:
        _check(where, number, int)


def _check(where: str, value: object, wanted: Any) -> None:
    if isinstance(wanted, dict):
        _check(where, value, dict)
        assert isinstance(value, dict)
        for name, kind in wanted.items():
            if name not in value:
                raise ValueError(f"{where}.{name}".lstrip(".") + ": is missing")
            _check(f"{where}.{name}".lstrip("."), value[name], kind)
        return
    fits = type(value) in ((int, float) if wanted is float else (wanted,))
    fits = fits and not (isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value))
    if not fits or (isinstance(value, int) and not 0 <= value < _MOST):
        shown = f"{value!r}"[:60] if isinstance(value, int | float | str) else type(value).__name__
        raise ValueError(f"{where or 'manifest'}: {shown} is not of {wanted.__name__}, or out of range")
