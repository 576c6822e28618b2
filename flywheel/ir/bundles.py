"""What tells the directory of a bundle from that of a checkpoint. Source: docs/bundle.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MANIFEST: Final = "bundle.json"


def is_bundle(folder: str) -> bool:
    """Whether a directory is a bundle. The bundle may be damaged."""
    try:
        return (Path(folder) / MANIFEST).is_file()
    except (OSError, ValueError):  # no file can have this name
        return False
