"""JSON text, and files that are read or replaced as a whole. What is read may come from a stranger."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import Any
from uuid import uuid4

from flywheel.errors import IrFormatError


def dump_json(data: object, indent: int | None = 2) -> str:
    """JSON text with insertion order kept; NaN and infinities are written as Python's json does."""
    return json.dumps(data, indent=indent, separators=(",", ": ") if indent else (",", ":"))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises IrFormatError on malformed, non-UTF-8 or absurdly nested text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise IrFormatError("JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, integers beyond Python's digit limit
        raise IrFormatError(f"JSON: {str(error).splitlines()[0]}") from None


def read_text(path: Path) -> str:
    """Text of a file. Raises IrFormatError where it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise IrFormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise IrFormatError(f"{path}: not UTF-8 at byte {error.start}") from None
    except ValueError as error:  # a NUL in the path
        raise IrFormatError(f"{str(path)!r}: {error}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file beside the one that `path` leads to, then rename it into place; the mode stays.

    What is there but no regular file, as a device or a pipe, is written to instead. Raises OSError.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not S_ISREG(mode):
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return
    place = path.resolve()
    draft = place.with_name(f".{place.name}.{uuid4().hex}")
    with ExitStack() as undo:
        undo.callback(draft.unlink, missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:
            if mode is not None:
                draft.chmod(S_IMODE(mode))
            file.write(text)
        draft.replace(place)
