"""Files of a cache, which are whole or do not count, whatever a power cut, a full disk or a damaged one leaves."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path


def seal(content: bytes) -> bytes:
    """The content behind a line with its digest."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unseal(raw: bytes) -> bytes | None:
    """What was sealed; None where any of it has changed."""
    digest, _, content = raw.partition(b"\n")
    return content if digest.decode("ascii", "replace") == hashlib.sha256(content).hexdigest() else None


def write_whole(path: Path, raw: bytes) -> None:
    """Write a file, which appears whole or not at all, whoever else writes it. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        unfinished = Path(file.name)
        try:
            file.write(raw)
            file.close()
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
