"""How results look on a terminal: aligned columns, numbers with units, and JSON.

What files and users name is shown, too. Every line for people passes `escaped` on its way out: nothing that a stranger
wrote moves a cursor, sets a title or begins a line of its own.
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
"""Characters of a line for people; what is longer is cut, and says so."""
MAX_COMPLAINT: Final = 1000
"""Characters of the line that says why a command failed."""
_GAP: Final = "  "
LEAST_CELL: Final = 8
"""Characters that a cell of words keeps on a narrow terminal."""
MAX_CELL: Final = 200
"""Characters of a cell of a table, whose column is as wide as its longest cell."""


def show(*lines: str) -> None:
    """Lines of the result, on stdout, each of them escaped."""
    write_out("".join(f"{line_of(line)}\n" for line in lines))


def show_table(headers: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "", gap: bool = False) -> None:
    """A table on stdout, behind an empty line where `gap` says so; on a terminal, with bold headers and no wider than
    it, as far as words can be cut."""
    room = get_terminal_size().columns if on_terminal() else None
    head, *body = map(line_of, table(headers, rows, indent, room))
    if on_terminal():
        head = f"\x1b[1m{head}\x1b[0m"
    write_out("".join(f"{line}\n" for line in ([""] if gap else []) + [head, *body]))


def show_document(text: str) -> None:
    """A file's text on stdout, as it is; on a terminal, all but its line breaks and tabs escaped."""
    if on_terminal():
        text = "".join(char if char in "\n\t" else escaped(char) for char in text)
    write_out(text)


def show_json(document: object, indent: int | None = 2) -> None:
    """The result as one JSON document on stdout; numbers that are not finite are null."""
    try:
        text = json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:  # hardly ever
        text = json.dumps(_finite(document), indent=indent, allow_nan=False)
    write_out(f"{text}\n")


def note(*lines: str) -> None:
    """Lines of progress or advice, on stderr, each of them escaped."""
    write_err("".join(f"{line_of(line)}\n" for line in lines))


def complain(message: str) -> None:
    """The one line on stderr that says why a command failed, as far as it can be written."""
    with suppress(OutputError, BrokenPipeError):
        note(line_of(f"flywheel: {' '.join(message.split())}", MAX_COMPLAINT))


def escaped(text: str) -> str:
    """`text` on one line: line breaks, ESC, lone surrogates and all else that cannot be printed as Python has them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def line_of(text: str, most: int = MAX_LINE) -> str:
    """`text` as one line for people: escaped, and cut behind `most` characters."""
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
    """Columns, those of numbers to the right. A header that starts with `<` is of words; the sign is not shown.

    Where lines would have more than `room` characters, the widest columns of words are cut.
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
    """Names in one column, values in the next; a pair without a value is left out."""
    shown = [(name, value) for name, value in items if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return [f"{indent}{name.ljust(width)}  {escaped(value)}" for name, value in shown]


def counts(numbers: Mapping[str, int]) -> str:
    """`predicted 118, rejected 2`; largest first."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in ordered) or "none"


def us(value: float | None) -> str:
    """A time in us."""
    return ABSENT if value is None else f"{value:,.1f} us"


def ties(trials: Iterable[tuple[str, float | None]]) -> str | None:
    """What a final could not tell from the best, as titles and latencies; None where it could."""
    rows = [f"{title} ({us(latency_us)})" for title, latency_us in trials]
    return f"with {', '.join(rows)}: the difference is within the noise" if rows else None


def percent(value: float | None) -> str:
    """A fraction."""
    return ABSENT if value is None else f"{value * 100:.1f} %"


def size(value: float | None) -> str:
    """Bytes, in decimal units as bandwidths are."""
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
    """A value of unknown type in a table."""
    return ABSENT if value is None else f"{value:,}" if type(value) is int else str(value)
