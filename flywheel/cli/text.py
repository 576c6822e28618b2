"""How results look on a terminal: aligned columns, numbers with units, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import Any, Final

import click

HELP: Final = MappingProxyType({"help_option_names": ["-h", "--help"], "max_content_width": 100})
"""How every command shows its help."""
ABSENT: Final = "-"


def show(text: str) -> None:
    """A line, or lines, of the result, on stdout. What a file or a user named is `escaped` before it gets here."""
    click.echo(_encodable(text))


def note(text: str) -> None:
    """A line of progress or advice, on stderr."""
    click.echo(_encodable(text), err=True)


def show_json(document: object, indent: int | None = 2) -> None:
    """The result as one JSON document on stdout; numbers that are not finite are null."""
    click.echo(json.dumps(_finite(document), indent=indent, allow_nan=False))


def escaped(text: str) -> str:
    """`text` on one line: line breaks, ESC, lone surrogates and all else that cannot be printed as Python has them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _finite(value: object) -> object:
    """`value` with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Columns, those of numbers to the right. A header that starts with `<` is of words; the sign is not shown."""
    words = [header.startswith("<") for header in headers]
    cells = [[header.removeprefix("<") for header in headers], *([escaped(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        aligned = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, words, strict=True)
        ]
        lines.append(indent + "  ".join(aligned).rstrip())
    return "\n".join([click.style(lines[0], bold=True), *lines[1:]])


def pairs(items: Iterable[tuple[str, str | None]], indent: str = "  ") -> str:
    """Names in one column, values in the next; a pair without a value is left out."""
    shown = [(name, value) for name, value in items if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}  {escaped(value)}" for name, value in shown)


def counts(numbers: Mapping[str, int]) -> str:
    """`predicted 118, rejected 2`; largest first."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in ordered) or "none"


def us(value: float | None) -> str:
    """A time in us."""
    return ABSENT if value is None else f"{value:,.1f} us"


def ties(trials: Iterable[tuple[int, float | None]]) -> str | None:
    """What a final could not tell from the best, as numbers and latencies; None where it could."""
    rows = [f"trial {number} ({us(latency_us)})" for number, latency_us in trials]
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
