"""Trials as TSV and CSV: the columns of COLUMNS in their order. The cell of an absent value is empty."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from flywheel.errors import StoreError
from flywheel.ir.show import show
from flywheel.measure.record import COLUMNS, Column, TrialRecord

_ESCAPES: Final = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES: Final = {escape: character for character, escape in _ESCAPES.items()}
_NUMBER: Final = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?(e[+-]?[0-9]{1,3})?|nan|-?inf")
_BY_NAME: Final = {column.name: column for column in COLUMNS}
_Parser = Callable[[Column, str], Any]
_SEPARATORS: Final = "\t,;"
_KEY: Final = "config_id"
"""The column by which a table is one of trials."""
_EXACT: Final = 2**53
"""The largest integer up to which a float holds every integer."""
_DERIVED: Final = "knob."
"""Columns whose names begin so are derived from the config."""
_UNIX: Final = re.compile(r"[^\r\n]*\n")
_ALONE: Final = re.compile(r"\r(?!\n)")
_RETURN: Final = "\udc0d"
"""Stands for a carriage return that ends no line: no UTF-8 text has this character."""
_MAX_CELL: Final = 131_072
_INDEX: Final = re.compile(r"|Unnamed: \d+")
"""The name of the column in which pandas writes row numbers: none, or what it makes of none."""


@dataclass(frozen=True, slots=True)
class TrialTable:
    """What a table says: its rows, and the names of the columns that are none of a trial's."""

    records: list[TrialRecord]
    ignored: tuple[str, ...] = ()


def to_tsv(records: Iterable[TrialRecord]) -> str:
    """One line a record under a header; tabs, newlines, carriage returns and backslashes are backslash-escaped."""
    lines = ["\t".join(_BY_NAME)]
    lines.extend("\t".join(_escape(cell) for cell in _cells(record)) for record in records)
    return "\n".join(lines) + "\n"


def to_csv(records: Iterable[TrialRecord]) -> str:
    """One row a record under a header, quoted as RFC 4180 does, with newline as line end."""
    lines: list[str] = []
    # Before 3.13, Python quotes a carriage return only if it is part of the line end.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerow(_BY_NAME)
    writer.writerows(_cells(record) for record in records)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def is_table(text: str) -> bool:
    """Whether a text begins as `read_table` reads it: with the header of a table of trials."""
    return _separator(text) is not None


def names_batch(text: str) -> bool:
    """Whether the header of a table of trials has a column of batches."""
    return "batch" in _first(text, _separator(text) or "\t")


def read_table(text: str, batch: int | None = None) -> TrialTable:
    """A table of trials with tabs, as `from_tsv` reads it, or with commas or semicolons, as spreadsheets and pandas
    write it. `text` has the line breaks of its file; it may begin with a byte-order mark.

    In the latter, cells may be quoted, columns have any order, and other columns are ignored. `ignored` does not name
    those of knobs and of row numbers. A whole number may have a decimal part of zero. Between semicolons, decimals may
    have a comma, if no number of the table has a point. Raises StoreError with the number of the line.
    """
    text = text.removeprefix("\ufeff")
    separator = _separator(text)
    if separator is None or separator == "\t":
        return TrialTable(from_tsv(text.replace("\r\n", "\n").replace("\r", "\n"), batch))
    rows = _rows(text, separator)
    _, names = next(rows)
    given = {} if batch is None or "batch" in names else {"batch": batch}
    columns = _header([name for name in names if name in _BY_NAME], given)
    at = [place for place, name in enumerate(names) if name in _BY_NAME]
    kept = []
    for line, cells in rows:
        if len(cells) != len(names):
            raise StoreError(f"table line {line}: {len(cells)} cells under {len(names)} columns")
        kept.append((line, [cells[place] for place in at]))
    numbers = [place for place, column in enumerate(columns) if column.python_type is not str]
    has_point = any("." in cells[place] for _, cells in kept for place in numbers)
    comma = separator == ";" and not has_point
    records = [_record(line, cells, columns, given, _parsed_comma if comma else _parsed_csv) for line, cells in kept]
    ignored = (name for place, name in enumerate(names) if name not in _BY_NAME and not name.startswith(_DERIVED)
               and (place or _INDEX.fullmatch(name) is None))  # fmt: skip
    return TrialTable(records, tuple(ignored))


def from_tsv(text: str, batch: int | None = None) -> list[TrialRecord]:
    """The records of a table that `to_tsv` wrote. Nullable columns may be missing; unknown columns are errors.

    `batch` is the batch of all rows if the table has no such column; otherwise the column counts. Raises StoreError
    with the number of the line.
    """
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    given = {} if batch is None or "batch" in lines[0].split("\t") else {"batch": batch}
    columns = _header(lines[0].split("\t"), given)
    rows = ((number, line.split("\t")) for number, line in enumerate(lines[1:], start=2))
    return [_record(number, cells, columns, given, _parsed) for number, cells in rows]


def _separator(text: str) -> str | None:
    """The separator of the header that has the column _KEY; None where there is no such header."""
    return next((mark for mark in _SEPARATORS if _KEY in _first(text, mark)), None)


def _first(text: str, separator: str) -> list[str]:
    """The cells of a text's first row; none where it cannot be read."""
    text = text.removeprefix("\ufeff")
    if separator == "\t":
        return re.split(r"[\r\n]", text, maxsplit=1)[0].split("\t")
    try:
        return next(_rows(text, separator), (0, []))[1]
    except StoreError:
        return []


def _rows(text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """(the line on which it begins, the cells) of each row that is not empty."""
    if _UNIX.match(text):  # Before 3.13, Python and with it pandas write a carriage return in a cell without quotes.
        text = _ALONE.sub(_RETURN, text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    line = 1
    try:
        for cells in reader:
            longest = max(map(len, cells), default=0)
            if longest > _MAX_CELL:  # whoever changes csv's own limit changes it for the whole process
                raise StoreError(f"table line {line}: a cell has {longest:,} characters, more than {_MAX_CELL:,}")
            if any(cells):
                yield line, [cell.replace(_RETURN, "\r") for cell in cells]
            line = reader.line_num + 1
    except csv.Error as error:
        raise StoreError(f"table line {line}: {error}") from None


def _header(names: Sequence[str], given: Collection[str]) -> list[Column]:
    unknown = [name for name in names if name not in _BY_NAME]
    if unknown:
        raise StoreError(f"table line 1: unknown column {show(unknown[0])}")
    if len(set(names)) != len(names):
        twice = next(name for name in _BY_NAME if names.count(name) > 1)
        raise StoreError(f"table line 1: column {twice} appears twice")
    missing = [column.name for column in COLUMNS if not column.nullable and column.name not in (*names, *given)]
    if missing == ["batch"]:
        raise StoreError("table line 1: column batch is missing; say how many sequences a step has")
    if missing:
        raise StoreError(f"table line 1: column {missing[0]} is missing")
    return [_BY_NAME[name] for name in names]


def _record(
    number: int, cells: Sequence[str], columns: Sequence[Column], given: Mapping[str, Any], parsed: _Parser
) -> TrialRecord:
    if len(cells) != len(columns):
        raise StoreError(f"table line {number}: {len(cells)} cells under {len(columns)} columns")
    values: dict[str, Any] = dict(given)
    for column, cell in zip(columns, cells, strict=True):
        try:
            values[column.name] = parsed(column, cell) if cell else None
        except (ValueError, KeyError):
            kind = column.python_type.__name__
            raise StoreError(f"table line {number}: {column.name} is {show(cell)}, not of type {kind}") from None
    try:
        return TrialRecord(**values)
    except ValueError as error:
        raise StoreError(f"table line {number}: {error}") from None


def _parsed(column: Column, cell: str) -> Any:
    """Raises ValueError or KeyError for a cell that `_cell` never writes."""
    if column.python_type is not str and _NUMBER.fullmatch(cell) is None:
        raise ValueError
    return column.python_type(_unescape(cell))


def _parsed_csv(column: Column, cell: str) -> Any:
    """The value of a cell that pandas or a spreadsheet wrote. Raises ValueError where it is of another type."""
    if column.python_type is str:
        return cell
    if _NUMBER.fullmatch(cell.lower()) is None:
        raise ValueError
    if column.python_type is int and not cell.removeprefix("-").isdecimal():
        number = float(cell)
        if not number.is_integer() or abs(number) > _EXACT:
            raise ValueError
        return int(number)
    return column.python_type(cell)


def _parsed_comma(column: Column, cell: str) -> Any:
    """As `_parsed_csv`, with a decimal comma."""
    return _parsed_csv(column, cell if column.python_type is str else cell.replace(",", "."))


def _cells(record: TrialRecord) -> list[str]:
    return [_cell(column, getattr(record, column.name)) for column in COLUMNS]


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return ""
    return float.__repr__(float(value)) if column.python_type is float else str(value)


def _escape(cell: str) -> str:
    return re.sub(r"[\\\t\n\r]", lambda found: _ESCAPES[found[0]], cell)


def _unescape(cell: str) -> str:
    return re.sub(r"\\.?", lambda found: _UNESCAPES[found[0]], cell, flags=re.DOTALL)
