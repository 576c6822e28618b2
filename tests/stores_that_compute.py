"""Stores of a few pages that compute for ever when they are read or written, each in its own way.

`spring(path, name)` turns the store at `path`, which nobody has open, into such a trap.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Final

FOREVER: Final = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
LARGE: Final = "hex(zeroblob(400000000))"
"""Takes 0.8 GB and a second."""


def _view(connection: sqlite3.Connection, table: str) -> None:
    columns = ", ".join(f'old."{name}"' for name in _columns(connection, table))
    connection.execute(f"ALTER TABLE {table} RENAME TO old")
    connection.execute(f"CREATE VIEW {table} AS {FOREVER} SELECT {columns} FROM old, n")


def _view_of_versions(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE schema_version")
    connection.execute(f"CREATE VIEW schema_version AS {FOREVER} SELECT max(i) AS version_num FROM n")


def _trigger(connection: sqlite3.Connection) -> None:
    connection.execute(
        f"CREATE TRIGGER later AFTER INSERT ON trials BEGIN DELETE FROM claims WHERE run IN ({FOREVER} "
        "SELECT max(i) FROM n); END"
    )


def _generated(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE campaigns RENAME COLUMN spec TO old")
    connection.execute(f"ALTER TABLE campaigns ADD COLUMN spec AS ({LARGE})")


def _check(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE claims")
    connection.execute(f"CREATE TABLE claims (campaign TEXT, config_id TEXT, run BIGINT, CHECK (length({LARGE}) > 1))")


def _default(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE claims")
    connection.execute(f"CREATE TABLE claims (campaign TEXT, config_id TEXT, run BIGINT, more TEXT DEFAULT ({LARGE}))")


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


_STATEMENTS: Final[Mapping[str, Callable[[sqlite3.Connection], object]]] = MappingProxyType({
    "trials are a view": lambda connection: _view(connection, "trials"),
    "campaigns are a view": lambda connection: _view(connection, "campaigns"),
    "the version is a view": _view_of_versions,
    "a trigger": _trigger,
    "a generated column": _generated,
    "a check": _check,
    "a default": _default,
    "an index of an expression": lambda connection: connection.execute("CREATE INDEX e ON trials (length(config))"),
    "a partial index": lambda connection: connection.execute("CREATE INDEX e ON trials (model) WHERE config LIKE 'a%'"),
    "a virtual table": lambda connection: connection.executescript(
        "DROP TABLE claims; CREATE VIRTUAL TABLE claims USING rtree(campaign, config_id, run)"
    ),
})  # fmt: skip

SHARED: Final = "pages that are shared"
TRAPS: Final = (*_STATEMENTS, SHARED)


def spring(path: Path, name: str) -> None:
    """Turn the store at `path` into the trap of that name."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        if name != SHARED:
            _STATEMENTS[name](connection)
        connection.commit()
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'campaigns'").fetchone()[0]
    if name == SHARED:
        share_pages(path, root, size)


def share_pages(path: Path, root: int, size: int, levels: int = 8, children: int = 400) -> None:
    """Make each page of a table's tree the only child, `children` times, of the one above it: a row is found
    `children ** levels` times. Source: SQLite, "Database File Format"."""
    raw = bytearray(path.read_bytes())
    leaf, last = bytes(raw[(root - 1) * size : root * size]), len(raw) // size
    raw += leaf
    for level in range(1, levels + 1):
        page = _interior(last + level, size, children)
        if level == levels:
            raw[(root - 1) * size : root * size] = page
        else:
            raw += page
    raw[28:32] = struct.pack(">I", len(raw) // size)
    path.write_bytes(raw)


def _interior(child: int, size: int, children: int) -> bytes:
    """A page of a table's tree whose children are all the same page."""
    page = bytearray(size)
    start = size
    for place in range(children):
        key = place + 1
        cell = struct.pack(">I", child) + bytes([key] if key < 128 else [0x80 | key >> 7, key & 127])
        start -= len(cell)
        page[start : start + len(cell)] = cell
        page[12 + 2 * place : 14 + 2 * place] = struct.pack(">H", start)
    page[:12] = struct.pack(">BHHHBI", 5, 0, children, start, 0, child)
    return bytes(page)
