"""What decides how a program runs on a GPU: the kernels' sources, and the modules that plan and pack programs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[2]

SOURCES: Final = _PACKAGE / "vm" / "cuda"
"""The kernels' sources: `megakernel.cu` and its headers."""
PACKING: Final = (_PACKAGE / "plan", _PACKAGE / "vm" / "pack")
"""The packages that make a kernel's tables from a program."""

_SUFFIXES: Final = (".cu", ".cuh", ".h", ".py")


def source_digest(*folders: Path) -> str:
    """SHA-256, in hex, over the names and bytes of all sources in the folders, by default in SOURCES."""
    digest = hashlib.sha256()
    for folder in folders or (SOURCES,):
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in _SUFFIXES}
        for name, path in sorted(files.items()):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def kernels_id(rooms: Sequence[Path] = (SOURCES, *PACKING)) -> str:
    """What a measurement names as its `kernels`: 16 hex digits of the digest of SOURCES and PACKING.

    Two measurements of a program are of the same machine code and tables only if these are equal.
    """
    return source_digest(*rooms)[:16]
