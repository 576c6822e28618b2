"""Writes a packed program and its kernel as a bundle's files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np

from flywheel.errors import UsageError
from flywheel.ir import BufferKind
from flywheel.ir.files import MANIFEST
from flywheel.plan import KernelVariant
from flywheel.runtime.manifest import (
    ALIGNMENT,
    ELEMENTS,
    FEATURES,
    FORMAT,
    KERNEL,
    LABELS,
    TABLES,
    VERSION,
    element_type,
    manifest_digest,
    structs_digest,
)
from flywheel.vm.abi import COUNTER_STRIDE, numpy_struct
from flywheel.vm.gpu.loader import STATE_BYTES
from flywheel.vm.gpu.nvrtc import CompiledVariant
from flywheel.vm.pack import PackedProgram

_FROM_VARIANT: Final = (
    "ring_slots", "chunk_bytes", "staged_bytes", "prefetch_depth", "inflight_chunks", "chunk_warps", "copies",
)  # fmt: skip
_FROM_PACKED: Final = ("n_counters", "workspace_stride", "pass_blocks")
_SHOWN: Final = ("amk_program_t", "amk_buffer_t", "amk_segment_t", "amk_report_t")
"""Structs that an engine reads or writes when it runs the bundle."""


def bundle_files(
    packed: PackedProgram, kernel: CompiledVariant, nvrtc: str, about: Mapping[str, Any], others: Mapping[str, bytes],
    tensors: Mapping[str, str],
) -> dict[str, bytes]:  # fmt: skip
    """The files of a bundle by name. The same arguments give the same bytes.

    `nvrtc` is the version that compiled the kernel. `about` has further sections of the manifest, JSON-ready, and
    `others` further files. `tensors` maps the program's names of weights to their names in the checkpoint's files.
    Raises UsageError for a program of several ranks or lanes.
    """
    program = packed.program
    if packed.part is not None:
        raise UsageError(f"bundle: a program of {packed.part.ranks} ranks; bundles are of one rank")
    if packed.lanes > 1:
        raise UsageError(f"bundle: a program of {packed.lanes} lanes a sequence; bundles are of one lane")
    assert program.target is not None
    tables, parts = _tables(packed)
    labels = _json([(task.id, task.label) for task in program.tasks])
    files = {KERNEL: kernel.cubin, TABLES: tables, LABELS: labels, **others}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "abi": structs_digest(),
        **about,
        "target": asdict(program.target),
        "kernel": {
            "file": KERNEL, "arch": kernel.arch, "key": kernel.key, "nvrtc": nvrtc, "threads": kernel.threads,
            "matrix_warps": kernel.matrix_warps, "dtype": kernel.dtype.name, "rows": kernel.rows,
            "formats": list(kernel.formats), "entries": {name: asdict(each) for name, each in kernel.entries.items()},
            **_features(kernel),
        },
        "launch": {
            "entry": "megakernel", "grid": len(packed.queues) - 1, "threads": kernel.threads,
            "smem_bytes": packed.variant.smem_bytes, "cooperative": True, "last_position": packed.last_position,
        },
        "variant": {
            **{name: value for name, value in asdict(packed.variant).items() if name != FEATURES},
            "formats": list(packed.variant.formats), **_features(packed.variant),
        },
        "tables": parts,
        "structs": {name: _members(name) for name in _SHOWN},
        "program": _program(packed),
        "memory": _memory(packed),
        "buffers": _buffers(packed, tensors),
        "coded": [
            {"row": row, "coding": each.coding.number, "scales": each.scales, "zeros": each.zeros,
             "group": each.group, "rows_per_scale": each.rows_per_scale}
            for row, each in packed.coded.items()
        ],
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
        },
    }  # fmt: skip
    manifest["digest"] = manifest_digest(manifest)
    return {MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode(), **files}


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a new directory, which appears complete or not at all. Raises OSError, and as `check_new`."""
    check_new(folder)
    place = folder.resolve()
    draft = place.with_name(f".{place.name}.{uuid4().hex}")
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, draft, ignore_errors=True)
        draft.mkdir()
        for name, data in files.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(data)
        draft.replace(place)


def check_new(folder: Path) -> None:
    """Raises UsageError unless the path is free or an empty directory, and OSError."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError(f"{str(folder)!r} exists; a bundle needs a new directory")


def _features(of: CompiledVariant | KernelVariant) -> dict[str, list[str]]:
    return {FEATURES: list(of.features)} if of.features else {}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _tables(packed: PackedProgram) -> tuple[bytes, dict[str, Any]]:
    """(all tables concatenated, the place of each)."""
    data, parts = bytearray(), {}
    for name, element in ELEMENTS.items():
        table = np.ascontiguousarray(getattr(packed, name))
        assert table.dtype == element_type(element), name
        parts[name] = {"offset": len(data), "count": len(table), "bytes": table.nbytes, "element": element}
        data += table.tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    return bytes(data), parts


def _members(name: str) -> dict[str, Any]:
    kind = numpy_struct(name)
    assert kind.fields is not None
    members = {}
    for field in kind.names or ():
        member, offset = kind.fields[field][:2]
        members[field] = [offset, f"{member.shape}{member.base.str}" if member.shape else member.str]
    return {"bytes": kind.itemsize, "members": members}


def _program(packed: PackedProgram) -> dict[str, Any]:
    """Members of amk_program_t: its numbers, and for its addresses the tables and memory regions that they point to."""
    numbers = {name: int(getattr(packed.variant, name)) for name in _FROM_VARIANT}
    numbers |= {name: int(getattr(packed, name)) for name in _FROM_PACKED}
    numbers |= {"set_stride": packed.arena.nbytes, "awaited_bytes": packed.arena.awaited_bytes}
    tables = ("buffers", "instructions", "queues", "steps", "segments", "streams", "floats")
    regions = {"counters": "counters", "state": "state", "report": "report", "workspace": "workspace",
               "awaited": "arena", "abort_flag": "abort_flag"}  # fmt: skip
    return {"numbers": numbers, "tables": {name: name for name in tables}, "memory": regions}


def _memory(packed: PackedProgram) -> dict[str, Any]:
    """Memory regions besides the tables: their sizes in bytes, and their content before the first launch."""
    grid, arena = len(packed.queues) - 1, packed.arena
    sizes = {
        "arena": arena.nbytes + arena.awaited_bytes, "counters": 2 * packed.n_counters * COUNTER_STRIDE,
        "state": STATE_BYTES, "report": numpy_struct("amk_report_t").itemsize,
        "workspace": grid * packed.workspace_stride, "abort_flag": 4,
    }  # fmt: skip
    return {
        name: {"bytes": size, "fill": 0xFF if name == "arena" else 0, "host": name == "abort_flag"}
        for name, size in sizes.items()
    }


def _buffers(packed: PackedProgram, tensors: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry for each row of the buffer table. `offset` is into the arena. A weight has the name of its tensor."""
    found = []
    for row, buffer in enumerate(packed.program.buffers):
        about: dict[str, Any] = {
            "id": buffer.id, "name": buffer.name, "kind": buffer.kind.name, "dtype": buffer.dtype.name,
            "shape": list(buffer.shape), "space": buffer.space.name,
        }  # fmt: skip
        if buffer.kind in (BufferKind.WEIGHT, BufferKind.CONST):
            about |= {"tensor": tensors[buffer.source or buffer.name], "layout": int(packed.buffers["layout"][row])}
        elif buffer.kind is not BufferKind.KV_CACHE:
            about["offset"] = packed.arena.offsets[row]
        found.append(about)
    return found
