"""Trials as TSV and CSV: the columns of COLUMNS in their order. The cell of an absent value is empty."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from flywheel.errors import StoreError
from flywheel.ir.show import show
from flywheel.measure.record import COLUMNS, Column, TrialRecord

_ESCAPES: Final = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES: Final = {escape: character for character, escape in _ESCAPES.items()}
_NUMBER: Final = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?(e[+-]?[0-9]{1,3})?|nan|-?inf")
_BY_NAME: Final = {column.name: column for column in COLUMNS}


def to_tsv(records: Iterable[TrialRecord]) -> str:
    """One line a record under a header; tabs, newlines, carriage returns and backslashes are backslash-escaped."""
    lines = ["\t".join(_BY_NAME)]
    lines.extend("\t".join(_escape(cell) for cell in _cells(record)) for record in records)
    return "\n".join(lines) + "\n"


def to_csv(records: Iterable[TrialRecord]) -> str:
    """One row a record under a header, quoted as RFC 4180 does, with newline as line end."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_BY_NAME)
    writer.writerows(_cells(record) for record in records)
    return out.getvalue()


def from_tsv(text: str, batch: int | None = None) -> list[TrialRecord]:
    """The records of a table that `to_tsv` wrote. Nullable columns may be missing; unknown columns are errors.

    `batch` is the batch of all rows if the table has no such column; otherwise the column counts. Raises StoreError
    with the number of the line.
    """
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    given = {} if batch is None or "batch" in lines[0].split("\t") else {"batch": batch}
    columns = _header(lines[0], given)
    return [_record(number, line, columns, given) for number, line in enumerate(lines[1:], start=2)]


def _header(line: str, given: Collection[str]) -> list[Column]:
    names = line.split("\t")
    unknown = [name for name in names if name not in _BY_NAME]
    if unknown:
        raise StoreError(f"table line 1: unknown column {show(unknown[0])}")
    if len(set(names)) != len(names):
        raise StoreError("table line 1: a column appears twice")
    missing = [column.name for column in COLUMNS if not column.nullable and column.name not in (*names, *given)]
    if missing == ["batch"]:
        raise StoreError("table line 1: column batch is missing; say how many sequences a step has")
    if missing:
        raise StoreError(f"table line 1: column {missing[0]} is missing")
    return [_BY_NAME[name] for name in names]


def _record(number: int, line: str, columns: list[Column], given: Mapping[str, Any]) -> TrialRecord:
    cells = line.split("\t")
    if len(cells) != len(columns):
        raise StoreError(f"table line {number}: {len(cells)} cells under {len(columns)} columns")
    values: dict[str, Any] = dict(given)
    for column, cell in zip(columns, cells, strict=True):
        try:
            values[column.name] = _parsed(column, cell) if cell else None
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
