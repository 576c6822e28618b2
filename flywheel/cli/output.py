"""The only way to stdout and stderr: a call writes every byte or raises an error."""

from __future__ import annotations

import io
import select
import sys
from typing import Any, Final, TextIO

from flywheel.errors import OutputError

_RETRY_S: Final = 1.0
"""Longest sleep, in seconds, before a full pipe is tried again."""


def write_out(text: str) -> None:
    """Write `text` to stdout. Raises OutputError, and BrokenPipeError where nobody reads it any more."""
    if sys.stdout is None:
        raise OutputError("output: cannot be written: stdout is closed")
    _write_all(sys.stdout, text)


def write_err(text: str) -> None:
    """Write `text` to stderr, where there is one. Raises as `write_out` does."""
    if sys.stderr is not None:
        _write_all(sys.stderr, text)


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def buffer_output() -> None:
    """Put buffers around a stdout and a stderr that have none, as PYTHONUNBUFFERED asks for.

    Without a buffer, Python silently drops what a short write leaves over. This module flushes at once anyway.
    """
    sys.stdout, sys.stderr = _buffered(sys.stdout), _buffered(sys.stderr)


def _buffered(stream: TextIO) -> TextIO:
    raw = getattr(stream, "buffer", None)
    if not isinstance(raw, io.FileIO):
        return stream
    opened = io.open(  # noqa: SIM115, UP020  it lives as long as the process
        raw.fileno(), "w", encoding=stream.encoding, errors=stream.errors, closefd=False
    )
    return opened


def _write_all(stream: TextIO, text: str) -> None:
    binary = getattr(stream, "buffer", None)
    try:
        if binary is None:  # a Python object, such as a notebook's stream
            stream.write(text)
            stream.flush()
            return
        stream.flush()
        left = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
        while left:
            left = left[_write_some(binary, left) :]
        while not _flushed(binary):
            _await_room(binary)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"output: cannot be written: {error.strerror or error}") from None


def _write_some(binary: Any, data: memoryview) -> int:
    """How many bytes of `data` the stream took."""
    try:
        written = binary.write(data)
    except BlockingIOError as error:
        written = error.characters_written
    if not written:
        _await_room(binary)
    return written or 0


def _flushed(binary: Any) -> bool:
    try:
        binary.flush()
    except BlockingIOError:
        return False
    return True


def _await_room(binary: Any) -> None:
    """Sleep until the reader of a full, non-blocking pipe has read some of it."""
    room = select.poll()  # select.select takes no descriptor above 1023
    room.register(binary.fileno(), select.POLLOUT)
    room.poll(1000 * _RETRY_S)
