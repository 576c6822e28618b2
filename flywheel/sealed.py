"""Files of a cache, which are whole or do not count, whatever a power cut, a full disk or a damaged one leaves."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from pathlib import Path
from stat import S_ISREG
from typing import IO, Final

MAX_BYTES: Final = 256 * 1024**2
"""Most bytes of a file of a cache. Larger ones count as damaged."""


def seal(content: bytes) -> bytes:
    """The content behind a line with its digest."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unseal(raw: bytes) -> bytes | None:
    """What was sealed; None where any of it has changed."""
    digest, _, content = raw.partition(b"\n")
    return content if digest.decode("ascii", "replace") == hashlib.sha256(content).hexdigest() else None


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> IO[bytes]:
    """A regular file of MAX_BYTES at most. Raises OSError, also for a pipe, which would keep its reader waiting, a
    device, which has no end, and a link."""
    refused = OSError(errno.EINVAL, f"no regular file of {MAX_BYTES >> 20} MiB at most", str(path))
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:  # ELOOP: a link; ENXIO: a pipe that none reads, a socket
        raise refused if error.errno in (errno.ELOOP, errno.ENXIO) else error from None
    file = os.fstat(descriptor)
    if S_ISREG(file.st_mode) and file.st_size <= MAX_BYTES:
        return os.fdopen(descriptor, mode)
    os.close(descriptor)
    raise refused


def read_plain(file: IO[bytes]) -> bytes:
    """What the file holds, MAX_BYTES at most, though another process may lengthen it. Raises OSError."""
    return file.read(MAX_BYTES)


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
