"""Whether a SQLite file that may come from a stranger is only tables with rows, so that reading it ends.

A view, a virtual table, a trigger, a generated column or an index of an expression computes while it is read or
written, for as long as its author likes. Tables whose pages are shared by several branches have more rows than the file
has bytes. Source: SQLite, "Defense Against The Dark Arts".
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Set
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, event

from flywheel.errors import StoreError
from flywheel.ir.show import show

_CHECKED_BYTES: Final = 2**24
"""Largest file whose pages are checked when it is opened, which takes 0.1 s. In larger files the steps are bounded."""

_BETWEEN_STEPS: Final = 10**5
"""Steps of SQLite's virtual machine between two looks at a statement's bound."""

_LEAST_STEPS: Final = 10**6
_STEPS_A_BYTE: Final = 4
"""A statement may take both together. Listing the campaigns of a million rows takes 0.1 steps a byte."""

_PLAIN: Final = re.compile(r"\(?(null|[-+]?[0-9.]+|'[^']*')\)?", re.IGNORECASE)
_COMPUTING: Final = re.compile(r"\b(check|generated|virtual)\b", re.IGNORECASE)
_EXPRESSION: Final = -2
"""What stands for a column's number in an index of an expression."""
_DAMAGED: Final = "***"
"""Begins what SQLite finds wrong with pages; what it finds wrong with rows has no mark."""


def bound_steps(engine: Engine, path: Path) -> None:
    """Interrupt a statement of this engine of SQLite if it takes more steps than a file of its size has work for."""
    looks = 0

    def begin(*_: object) -> None:
        nonlocal looks
        looks = 0

    def exceeded() -> bool:
        nonlocal looks
        looks += 1
        return looks * _BETWEEN_STEPS > _LEAST_STEPS + _STEPS_A_BYTE * _bytes_of(path)

    def watch(connection: sqlite3.Connection, _record: object) -> None:
        connection.set_progress_handler(exceeded, _BETWEEN_STEPS)

    event.listen(engine, "connect", watch)
    event.listen(engine, "before_cursor_execute", begin)


def check_tables(connection: Connection, name: str, tables: Set[str]) -> None:
    """Raises StoreError unless each of the store's `tables` that is there is a table whose rows are stored, and nothing
    is computed when it is read or written."""
    present = []
    for kind, entry, of, sql in connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master").all():
        if tables.isdisjoint({str(of).lower(), str(entry).lower()}):
            continue
        if kind not in ("table", "index"):
            raise StoreError(f"store {name}: {show(entry)} is a {kind}; a store has only tables and indexes")
        if kind == "table":
            if (found := _COMPUTING.search(str(sql))) is not None:
                raise StoreError(
                    f"store {name}: table {show(entry)} has a {found[0].upper()}; a store's tables have none"
                )
            present.append(str(entry).lower())
    for table in present:
        _check_columns(connection, name, table)
        _check_indexes(connection, name, table)
    if _bytes_of(_path_of(connection)) <= _CHECKED_BYTES:
        for table in present:
            _check_pages(connection, name, table)


def _check_columns(connection: Connection, name: str, table: str) -> None:
    for _, column, _, _, default, _, hidden in connection.exec_driver_sql(f"PRAGMA table_xinfo({table})").all():
        if hidden:
            raise StoreError(f"store {name}: column {show(column)} of {table} is computed, not stored")
        if default is not None and _PLAIN.fullmatch(default) is None:
            raise StoreError(f"store {name}: the default of column {show(column)} of {table} is computed")


def _check_indexes(connection: Connection, name: str, table: str) -> None:
    for _, index, _, _, partial in connection.exec_driver_sql(f"PRAGMA index_list({table})").all():
        quoted = '"' + index.replace('"', '""') + '"'
        columns = connection.exec_driver_sql(f"PRAGMA index_xinfo({quoted})").all()
        if partial or any(number == _EXPRESSION for _, number, *_ in columns):
            raise StoreError(f"store {name}: index {show(index)} of {table} is computed")


def _check_pages(connection: Connection, name: str, table: str) -> None:
    found = connection.exec_driver_sql(f"PRAGMA quick_check({table})").scalar()
    if isinstance(found, str) and found.startswith(_DAMAGED):
        raise StoreError(f"store {name}: is damaged: SQLite finds its image malformed")


def _path_of(connection: Connection) -> Path:
    return Path(connection.exec_driver_sql("PRAGMA database_list").one()[2])


def _bytes_of(path: Path) -> int:
    """Of a database and its log."""
    return sum(each.stat().st_size for each in (path, path.with_name(f"{path.name}-wal")) if each.exists())
