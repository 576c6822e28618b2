"""Connections to a store's database, and what its errors mean in one line."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from flywheel.errors import StoreError

BUSY_TIMEOUT_S: Final = 30

_WRITES: Final = "flywheel_writes"
_FACTS: Final = (
    ("database is locked", f"is locked by another process; waited {BUSY_TIMEOUT_S} s"),
    ("readonly database", "is read-only"),
    ("not a database", "is not a SQLite database"),
    ("malformed", "is damaged: SQLite finds its image malformed"),
    ("disk is full", "cannot grow: the disk is full"),
    ("unable to open database file", "cannot be opened"),
    ("disk i/o error", "cannot be read or written: I/O error"),
)


def make_engine(url: str | Path, *, create: bool) -> tuple[Engine, str]:
    """Engine for a path (SQLite) or a `sqlite:` or `postgresql:` URL, and the name that errors give the store.

    Raises StoreError for another kind of database, a driver that is not installed, a path that cannot hold a file and,
    with `create=False`, one that holds none.
    """
    where = make_store_url(url)
    name = store_name(where)
    if where.get_backend_name() == "sqlite":
        _check_path(where, name, create)
        # isolation_level None: sqlite3 begins no transactions of its own, the "begin" event below does.
        engine = create_engine(where, connect_args={"timeout": BUSY_TIMEOUT_S, "isolation_level": None})
        event.listen(engine, "connect", _set_pragmas)
        event.listen(engine, "begin", _begin)
        return engine, name
    try:
        return create_engine(where, pool_pre_ping=True), name
    except ImportError:
        raise StoreError(f"store {name}: its driver psycopg is not installed; install flywheel[postgres]") from None


def make_store_url(url: str | Path) -> URL:
    """SQLAlchemy's URL of a store; whatever has no `://` is the path of a SQLite file. Raises StoreError."""
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(url))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreError("store: not a database URL; want a path, sqlite:///PATH or postgresql://HOST/NAME") from None
    match parsed.drivername:
        case "sqlite":
            return parsed
        case "postgresql" | "postgresql+psycopg":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise StoreError(f"store {store_name(parsed)}: {other} is not supported; use sqlite or postgresql")


def store_name(url: URL) -> str:
    """What errors call the store: a SQLite file's path, or the URL without its password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return url.database
    return url.render_as_string(hide_password=True)


@contextmanager
def reading(engine: Engine, name: str) -> Iterator[Connection]:
    """A connection in a transaction that sees one state of the store. Raises StoreError."""
    with reported(name), engine.connect() as connection:
        yield connection


@contextmanager
def writing(engine: Engine, name: str) -> Iterator[Connection]:
    """A connection in a transaction that holds the write lock from its start. Raises StoreError."""
    with reported(name), engine.connect().execution_options(**{_WRITES: True}) as connection, connection.begin():
        yield connection


@contextmanager
def reported(name: str) -> Iterator[None]:
    """Turn whatever the database or its driver raises into a StoreError that names the store."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, UnicodeError, OverflowError) as error:
        raise StoreError(f"store {name}: {_fact(error)}") from error


def _fact(error: Exception) -> str:
    text = str(getattr(error, "orig", None) or error)
    lowered = text.lower()
    for needle, fact in _FACTS:
        if needle in lowered:
            return fact
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def _check_path(url: URL, name: str, create: bool) -> None:
    database = url.database
    if not database or database == ":memory:" or database.startswith("file:"):
        return
    path = Path(database)
    if path.is_dir():
        raise StoreError(f"store {name}: is a directory, not a file")
    if not path.parent.is_dir():
        raise StoreError(f"store {name}: directory {path.parent} does not exist")
    if not create and not path.exists():
        raise StoreError(f"store {name}: does not exist")


def _set_pragmas(connection: Any, _record: object) -> None:
    for pragma in ("foreign_keys=ON", "synchronous=NORMAL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
