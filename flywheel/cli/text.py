"""How results look on a terminal: aligned columns, numbers with units, and JSON.

Names from files and users are shown, too. `escaped` treats every line of text on its way out, so that no such name
moves the cursor, sets a title or begins a new line.
"""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from shutil import get_terminal_size, which
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from flywheel.cli.output import on_terminal, write_err, write_out
from flywheel.errors import OutputError
from flywheel.ir.show import escaped
from flywheel.measure.latency import rounded, tokens_per_s

if TYPE_CHECKING:
    from flywheel.measure.latency import Band
    from flywheel.measure.record import TrialRecord

HELP: Final = MappingProxyType({"help_option_names": ["-h", "--help"], "max_content_width": 100})
"""How every command shows its help."""
ABSENT: Final = "-"
MAX_LINE: Final = 8000
"""Characters of a line of text. A longer line is cut, and says so."""
MAX_COMPLAINT: Final = 1000
"""Characters of the line that says why a command failed."""
_GAP: Final = "  "
_TAKEN: Final = "flywheel.stdout"
LEAST_CELL: Final = 8
"""Characters that a cell of words keeps on a narrow terminal."""
LEAST_OPTIONAL: Final = 16
"""Characters below which a column of words is left out rather than cut, where it may be."""
LEAST_WRAPPED: Final = 30
"""Characters beside the margin below which a text is not broken into lines."""
MAX_CELL: Final = 200
"""Characters of a cell of a table, whose column is as wide as its longest cell."""


def take_stdout(flag: str) -> str | None:
    """Reserve stdout for the file of the option `flag`: from then on, the command's text goes to stderr. Returns the
    option that has taken stdout before."""
    ctx = click.get_current_context()
    before: str | None = ctx.meta.get(_TAKEN)
    ctx.meta[_TAKEN] = flag
    return before


def stdout_taken() -> str | None:
    """The option whose file goes to stdout; None where there is none."""
    ctx = click.get_current_context(silent=True)
    return None if ctx is None else ctx.meta.get(_TAKEN)


def show(*lines: str) -> None:
    """Write lines of the result to stdout, escaped; to stderr where a file goes to stdout."""
    _write("".join(f"{line_of(line)}\n" for line in lines))


def show_table(headers: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "", gap: bool = False) -> None:
    """Write a table where `show` writes, after an empty line if `gap`.

    On a terminal, headers are bold, and columns are cut or left out to fit it, as in `table`; a line on stderr names
    those left out.
    """
    room = get_terminal_size().columns if on_terminal() else None
    lines, left_out = _fitted(headers, rows, indent, room)
    head, *body = map(line_of, lines)
    if on_terminal():
        head = f"\x1b[1m{head}\x1b[0m"
    _write("".join(f"{line}\n" for line in ([""] if gap else []) + [head, *body]))
    if left_out:
        words = f"not shown for want of room: {', '.join(left_out)}; --json has all"
        note(*(f"{indent}{line}" for line in wrapped(words, len(indent))))


def show_document(text: str) -> None:
    """Write a file's text to stdout unchanged; on a terminal, escape all but line breaks and tabs."""
    if on_terminal():
        text = "".join(char if char in "\n\t" else escaped(char) for char in text)
    write_out(text)


def show_json(document: object, indent: int | None = 2) -> None:
    """Write the result to stdout as one JSON document, as `json_text` has it."""
    write_out(json_text(document, indent))


def json_text(document: object, indent: int | None = 2) -> str:
    """A document as lines of JSON. Numbers that are not finite become null."""
    try:
        text = json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:  # a number is not finite
        text = json.dumps(_finite(document), indent=indent, allow_nan=False)
    return f"{text}\n"


def note(*lines: str) -> None:
    """Write lines of progress or advice to stderr, escaped."""
    write_err("".join(f"{line_of(line)}\n" for line in lines))


def complain(message: str) -> None:
    """Write the line that says why a command failed to stderr, if stderr can be written."""
    with suppress(OutputError, BrokenPipeError):
        note(line_of(f"flywheel: {' '.join(message.split())}", MAX_COMPLAINT))


def line_of(text: str, most: int = MAX_LINE) -> str:
    """`text` on one line: escaped, and cut after `most` characters."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text):,} characters)"
    return escaped(text)


def _write(text: str) -> None:
    (write_out if stdout_taken() is None else write_err)(text)


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
    """Lines of aligned columns. A header that starts with `<` marks a column of words, `<!` one of names that users
    type, and another `?` before it a column that may be left out; the signs are not shown. All other columns are
    aligned to the right.

    If lines are longer than `room` characters, the widest columns of words are cut, names never. If that is not enough,
    columns that may be left out go, the last one first.
    """
    return _fitted(headers, rows, indent, room)[0]


def _fitted(
    headers: Sequence[str], rows: Iterable[Sequence[str]], indent: str, room: int | None
) -> tuple[list[str], list[str]]:
    """(lines of a table, titles of the columns that are left out)."""
    cells = [[line_of(cell, MAX_CELL) for cell in row] for row in rows]
    columns = [_TableColumn.of(header, [row[place] for row in cells]) for place, header in enumerate(headers)]
    widths = _widths(columns, None if room is None else room - len(indent))
    lines = []
    for row in [[column.title for column in columns], *cells]:
        aligned = [
            _cut(row[place], width).ljust(width) if columns[place].left else row[place].rjust(width)
            for place, width in widths.items()
        ]
        lines.append(indent + _GAP.join(aligned).rstrip())
    return lines, [column.title for place, column in enumerate(columns) if place not in widths]


@dataclass(frozen=True, slots=True)
class _TableColumn:
    """A column of a table: its title, its width in full, and the width to which it may be cut."""

    title: str
    width: int
    least: int
    left: bool
    optional: bool

    @classmethod
    def of(cls, header: str, cells: Sequence[str]) -> _TableColumn:
        """A column by its header, with the signs of `table`."""
        marked = header.removeprefix("?")
        left, is_name, title = marked.startswith("<"), marked.startswith("<!"), marked.lstrip("<!")
        width = max(map(len, [title, *cells]))
        least = LEAST_OPTIONAL if header != marked else LEAST_CELL
        return cls(title, width, width if is_name or not left else min(width, least), left, header != marked)


def _widths(columns: Sequence[_TableColumn], room: int | None) -> dict[int, int]:
    """Place -> width of each column that is shown. Columns left out come back, the first one first, where the others
    leave them room. Where columns that stay do not fit, they are as narrow as they may be."""
    places = range(len(columns))
    if room is None:
        return {place: columns[place].width for place in places}
    shown = [*places]
    optional = [place for place in places if columns[place].optional]
    while (widths := _narrowed([columns[place] for place in shown], room)) is None:
        if not optional:
            return {place: columns[place].least for place in shown}
        shown.remove(optional.pop())
    for place in places:
        more = sorted({*shown, place})
        wider = _narrowed([columns[each] for each in more], room)
        shown, widths = (shown, widths) if wider is None else (more, wider)
    return dict(zip(shown, widths, strict=True))


def _narrowed(columns: Sequence[_TableColumn], room: int) -> list[int] | None:
    """The columns' widths with the widest narrowed as far as needed to fit into `room`; None where that does not do."""
    widths = [column.width for column in columns]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - room
    while excess > 0:
        wide = [place for place, column in enumerate(columns) if widths[place] > column.least]
        if not wide:
            return None
        widths[max(wide, key=lambda place: widths[place])] -= 1
        excess -= 1
    return widths


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 1]}…"


class Command(str):
    """A command line for `pairs`. Where it is broken, it is broken between words, with a backslash before the break, so
    that it can be pasted. If the shell would not find `flywheel`, it has the path by which flywheel was called."""

    __slots__ = ()

    def __new__(cls, words: Sequence[str]) -> Command:
        called = sys.argv[0]
        if words[0] == "flywheel" and Path(called).name == "flywheel" and which("flywheel") is None:
            words = [called, *words[1:]]
        return super().__new__(cls, shlex.join(words))


def pairs(items: Iterable[tuple[str, str | None]], indent: str = "  ") -> list[str]:
    """Lines of names and values in two columns. A pair without a value is left out. On a terminal, long values are
    broken between words."""
    shown = [(name, value) for name, value in items if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    margin = len(indent) + width + len(_GAP)
    lines = []
    for name, value in shown:
        first, *more = wrapped(value, margin)
        lines += [f"{indent}{name.ljust(width)}{_GAP}{first}", *(" " * margin + line for line in more)]
    return lines


def wrapped(value: str, margin: int) -> list[str]:
    """A text as lines that fit beside a margin on the terminal; one line where stdout is none, or too narrow. No word
    is broken."""
    room = get_terminal_size().columns - margin if on_terminal() else 0
    if room < LEAST_WRAPPED or len(value) <= room:
        return [escaped(value)]
    if not isinstance(value, Command):
        return textwrap.wrap(escaped(value), room, break_long_words=False, break_on_hyphens=False)
    lines = [""]
    for word in shlex.split(value):
        quoted = escaped(shlex.quote(word))
        if lines[-1] and len(lines[-1]) + len(quoted) + 3 > room:
            lines.append("")
        lines[-1] += f" {quoted}" if lines[-1] else quoted
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def counts(numbers: Mapping[str, int]) -> str:
    """Counts as `predicted 118, rejected 2`, the largest first."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in ordered) or "none"


def amount(number: int, noun: str) -> str:
    """`1 trial`, `1,200 trials`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def us(value: float | None) -> str:
    """A time in us as text."""
    return ABSENT if value is None else f"{value:,.1f} us"


def predicted(value: float | None, band: Band | None = None) -> str:
    """A predicted time in us as text, with no more digits than a prediction has, and the range in which a measurement
    is expected where its `band` is given."""
    if value is None:
        return ABSENT
    return f"{rounded(value)} us{'' if band is None else f', {band.words(value)}'}"


def tokens(latency_us: float | None, batch: int, is_predicted: bool) -> str:
    """The tokens a second of a step's time as text, with no more digits than they have."""
    if latency_us is None:
        return ABSENT
    rate = tokens_per_s(latency_us, batch)
    return rounded(rate) if is_predicted else f"{rate:,.0f}"


def us_of(record: TrialRecord) -> str:
    """A row's latency as text."""
    return predicted(record.predicted_us) if record.latency_us is None else us(record.latency_us)


def predicted_a_token(value: float, batch: int, band: Band) -> str:
    """As `us_a_token`, with the range in which a measurement is expected: `3,470 us a token (288 tokens/s), measured
    perhaps 2,990 to 3,960 us`."""
    step = "token" if batch == 1 else "step"
    rate = rounded(tokens_per_s(value, batch))
    return f"{predicted(value)} a {step} ({rate} tokens/s), {band.words(value)}"


def us_a_token(value: float, batch: int) -> str:
    """The time of a step that makes one token of each of `batch` sequences, and the tokens a second of all together:
    `4,995.0 us a token (200 tokens/s)`."""
    return f"{us(value)} a {'token' if batch == 1 else 'step'} ({tokens_per_s(value, batch):,.0f} tokens/s)"


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
