"""JSON text, and files that are read or replaced as a whole.

Input may come from a stranger. This module limits its bytes and its values, and refuses an object with one name twice.
A bundle and a checkpoint are both directories: MANIFEST tells them apart (docs/bundle.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import Any, BinaryIO, Final
from uuid import uuid4

from flywheel.errors import IrFormatError, UsageError
from flywheel.ir.show import show

MAX_FILE_BYTES: Final = 2**30
"""Bytes of the largest file that is read. The program of the largest model that fits a GPU, in its finest tiles, has
0.2 of it."""

MAX_VALUES: Final = 2**25
"""Most values of a JSON text, counted by its commas and brackets. Parsed, they take about 3 GB."""

_SQLITE: Final = b"SQLite format 3\0"
"""How a SQLite database begins. Source: SQLite, "Database File Format"."""

_MOST_DIGITS: Final = 21
"""Characters of a 64-bit integer with its sign."""

_LONG: Final = re.compile(r"\d{20}")
_LONG_BYTES: Final = re.compile(rb"\d{20}")
"""Finds texts that may have an integer of more than 64 bits. Only in these is each integer checked."""


def dump_json(data: object, indent: int | None = 2) -> str:
    """JSON text that keeps the insertion order. NaN and infinities are written as by Python's json."""
    return json.dumps(data, indent=indent, separators=(",", ": ") if indent else (",", ":"))


def parse_json(text: str | bytes, long_integers: bool = False) -> Any:
    """Parse JSON.

    Raises IrFormatError where the text is malformed, not UTF-8, too deeply nested or too large, where an integer has
    more than 64 bits (with `long_integers`, thousands of digits), and where an object has a name twice.
    """
    values = sum(text.count(mark) if isinstance(text, str) else text.count(mark.encode()) for mark in ",[{")
    if values > MAX_VALUES:
        raise IrFormatError(f"JSON: {values:,} values, more than {MAX_VALUES:,}")
    if isinstance(text, str) and text.startswith("\ufeff"):
        raise IrFormatError("JSON: the text begins with a byte-order mark; want UTF-8 without one")
    try:
        has_long = _LONG.search(text) if isinstance(text, str) else _LONG_BYTES.search(text)
        counted = has_long and not long_integers
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer if counted else None)
    except RecursionError:
        raise IrFormatError("JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and the hooks' errors
        raise IrFormatError(f"JSON: {str(error).splitlines()[0]}") from None


def json_of(text: str, where: str) -> Any:
    """As `parse_json`; its error names `where` the text is from."""
    try:
        return parse_json(text)
    except IrFormatError as error:
        raise IrFormatError(f"{where}: {error}") from None


def read_json(path: Path) -> Any:
    """The JSON of a file. Raises as `read_text` and `json_of`, with the file's name."""
    return json_of(read_text(path), str(path))


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) <= _MOST_DIGITS else 2**64
    if abs(number) >= 2**64:
        raise ValueError(f"integer {show(digits)} has more than 64 bits")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"an object has {show(name)} twice")
            seen.add(name)
    return made


def read_text(path: Path, most: int = MAX_FILE_BYTES, newlines: bool = True) -> str:
    """The text of a file, with line breaks as newlines; as they are without `newlines`. Raises IrFormatError where it
    is unreadable, not UTF-8, or larger than `most` bytes."""
    try:
        with path.open("rb") as stream:
            return read_stream(stream, str(path), most, newlines)
    except OSError as error:
        raise IrFormatError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise IrFormatError(f"{str(path)!r}: {error}") from None


def read_stream(stream: BinaryIO, name: str, most: int = MAX_FILE_BYTES, newlines: bool = True) -> str:
    """As `read_text`, for an open file, pipe or device called `name`."""
    raw = stream.read(most + 1)
    if len(raw) > most:
        raise IrFormatError(f"{name}: more than {most:,} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise IrFormatError(f"{name}: not UTF-8 at byte {error.start}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if newlines and "\r" in text else text


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Write `text`, or its pieces, to a temporary file beside the target of `path`, then rename it into place. The
    file's mode stays.

    If the target exists and is no regular file, such as a device or a pipe, the text is written to it instead. Raises
    OSError.
    """
    pieces = (text,) if isinstance(text, str) else text
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not S_ISREG(mode):
        with path.open("w", encoding="utf-8") as stream:
            stream.writelines(pieces)
        return
    place = path.resolve()
    draft = place.with_name(f".{place.name}.{uuid4().hex}")
    with ExitStack() as undo:
        undo.callback(draft.unlink, missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:
            if mode is not None:
                draft.chmod(S_IMODE(mode))
            file.writelines(pieces)
        draft.replace(place)


def replace_file(path: Path, text: str | Iterable[str]) -> None:
    """As `write_atomically`. Raises UsageError where that fails, and as `check_no_database`."""
    check_no_database(path)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def check_no_database(path: Path) -> None:
    """Raises UsageError where `path` is a SQLite database, such as a trial store: no text may replace one."""
    try:
        if not path.is_file():
            return
        with path.open("rb") as stream:
            found = stream.read(len(_SQLITE))
    except (OSError, ValueError):  # whoever writes it says why that fails
        return
    if found == _SQLITE:
        raise UsageError(f"{path}: is a SQLite database, as a trial store is; name another file")


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths name one file, which need not be there."""
    try:
        return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))
    except (OSError, ValueError, RuntimeError):  # no file can have this name; a loop of links
        return False


MANIFEST: Final = "bundle.json"


def is_bundle(folder: str) -> bool:
    """Whether a directory is a bundle. The bundle may be damaged."""
    try:
        return (Path(folder) / MANIFEST).is_file()
    except (OSError, ValueError):  # no file can have this name
        return False
