"""How results look on a terminal: aligned columns, numbers with units, and JSON.

Names from files and users are shown, too. `escaped` treats every line of text on its way out, so that no such name
moves the cursor, sets a title or begins a new line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from shutil import get_terminal_size
from types import MappingProxyType
from typing import Any, Final

from flywheel.cli.output import on_terminal, write_err, write_out
from flywheel.errors import OutputError

HELP: Final = MappingProxyType({"help_option_names": ["-h", "--help"], "max_content_width": 100})
"""How every command shows its help."""
ABSENT: Final = "-"
MAX_LINE: Final = 8000
"""Characters of a line of text. A longer line is cut, and says so."""
MAX_COMPLAINT: Final = 1000
"""Characters of the line that says why a command failed."""
_GAP: Final = "  "
LEAST_CELL: Final = 8
"""Characters that a cell of words keeps on a narrow terminal."""
MAX_CELL: Final = 200
"""Characters of a cell of a table, whose column is as wide as its longest cell."""


def show(*lines: str) -> None:
    """Write lines of the result to stdout, escaped."""
    write_out("".join(f"{line_of(line)}\n" for line in lines))


def show_table(headers: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "", gap: bool = False) -> None:
    """Write a table to stdout, after an empty line if `gap`.

    On a terminal, headers are bold, and columns of words are cut to fit the terminal as far as possible.
    """
    room = get_terminal_size().columns if on_terminal() else None
    head, *body = map(line_of, table(headers, rows, indent, room))
    if on_terminal():
        head = f"\x1b[1m{head}\x1b[0m"
    write_out("".join(f"{line}\n" for line in ([""] if gap else []) + [head, *body]))


def show_document(text: str) -> None:
    """Write a file's text to stdout unchanged; on a terminal, escape all but line breaks and tabs."""
    if on_terminal():
        text = "".join(char if char in "\n\t" else escaped(char) for char in text)
    write_out(text)


def show_json(document: object, indent: int | None = 2) -> None:
    """Write the result to stdout as one JSON document. Numbers that are not finite become null."""
    try:
        text = json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:  # a number is not finite
        text = json.dumps(_finite(document), indent=indent, allow_nan=False)
    write_out(f"{text}\n")


def note(*lines: str) -> None:
    """Write lines of progress or advice to stderr, escaped."""
    write_err("".join(f"{line_of(line)}\n" for line in lines))


def complain(message: str) -> None:
    """Write the line that says why a command failed to stderr, if stderr can be written."""
    with suppress(OutputError, BrokenPipeError):
        note(line_of(f"flywheel: {' '.join(message.split())}", MAX_COMPLAINT))


def escaped(text: str) -> str:
    """`text` on one line. Line breaks, ESC, lone surrogates and all else that cannot be printed are escaped as in
    Python."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def line_of(text: str, most: int = MAX_LINE) -> str:
    """`text` on one line: escaped, and cut after `most` characters."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text):,} characters)"
    return escaped(text)


def _finite(value: object) -> object:
    """`value` with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "", room: int | None = None
) -> list[str]:
    """Lines of aligned columns. A header that starts with `<` marks a column of words; the sign is not shown, and all
    other columns are aligned to the right.

    If lines are longer than `room` characters, the widest columns of words are cut.
    """
    words = [header.startswith("<") for header in headers]
    cells = [[header.removeprefix("<") for header in headers]]
    cells += [[line_of(cell, MAX_CELL) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if room is not None:
        widths = _fitting(widths, words, room - len(indent))
    lines = []
    for row in cells:
        aligned = [
            _cut(cell, width).ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, words, strict=True)
        ]
        lines.append(indent + _GAP.join(aligned).rstrip())
    return lines


def _fitting(widths: Sequence[int], words: Sequence[bool], room: int) -> list[int]:
    """`widths` with the widest columns of words narrowed, to LEAST_CELL at least, until all fit into `room`."""
    fitted = list(widths)
    while sum(fitted) + len(_GAP) * (len(fitted) - 1) > room:
        wide = [index for index, left in enumerate(words) if left and fitted[index] > LEAST_CELL]
        if not wide:
            break
        fitted[max(wide, key=lambda index: fitted[index])] -= 1
    return fitted


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 1]}…"


def pairs(items: Iterable[tuple[str, str | None]], indent: str = "  ") -> list[str]:
    """Lines of names and values in two columns. A pair without a value is left out."""
    shown = [(name, value) for name, value in items if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return [f"{indent}{name.ljust(width)}  {escaped(value)}" for name, value in shown]


def counts(numbers: Mapping[str, int]) -> str:
    """Counts as `predicted 118, rejected 2`, the largest first."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in ordered) or "none"


def us(value: float | None) -> str:
    """A time in us as text."""
    return ABSENT if value is None else f"{value:,.1f} us"


def ties(trials: Iterable[tuple[str, float | None]]) -> str | None:
    """The trials that a final could not tell from the best, as words; None where there are none."""
    rows = [f"{title} ({us(latency_us)})" for title, latency_us in trials]
    return f"with {', '.join(rows)}: the difference is within the noise" if rows else None


def percent(value: float | None) -> str:
    """A fraction as a percentage."""
    return ABSENT if value is None else f"{value * 100:.1f} %"


def size(value: float | None) -> str:
    """Bytes as text, in decimal units like bandwidths."""
    if value is None:
        return ABSENT
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3f} {unit}" if unit == "GB" else f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """`12.4 s`, `3:05` minutes or `1:02:03` hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def cell(value: Any) -> str:
    """The text of a value of any type in a table."""
    return ABSENT if value is None else f"{value:,}" if type(value) is int else str(value)
