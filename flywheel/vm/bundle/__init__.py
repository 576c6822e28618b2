"""A packed program and its kernel as files that need no lowering, proof or compiler to run. Source: docs/bundle.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MANIFEST: Final = "bundle.json"


def is_bundle(folder: str) -> bool:
    """Whether a directory is a bundle. The bundle may be damaged."""
    try:
        return (Path(folder) / MANIFEST).is_file()
    except OSError:  # no file can have this name
        return False
