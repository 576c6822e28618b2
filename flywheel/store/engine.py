"""Connections to a store's database, and what its errors mean in one line."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from flywheel.errors import StoreError
from flywheel.installing import install_line
from flywheel.store.places import check_file, check_parameters, file_of, make_store_url, readable, store_name
from flywheel.store.vetting import bound_steps

BUSY_TIMEOUT_S: Final = 30
"""Seconds to wait for a lock that another process holds, and for a server to accept a connection."""

ANSWER_S: Final = 35.0
"""How long a server may take to answer one statement: a little more than a wait for a lock."""

_WRITES: Final = "flywheel_writes"
_FACTS: Final = (  # by SQLSTATE or, without one, by words of the message
    ("database is locked", "is locked by another process; waited {limit} s"),
    ("55p03", "is locked by another session; waited {limit} s"),
    ("connection timeout expired", "does not answer; waited {limit} s"),
    ("gave no answer", "does not answer; waited {answer:g} s"),
    ("57014", "takes too long; waited {answer:g} s"),
    ("interrupted", "is damaged: a query takes more steps than its file has work for"),
    ("readonly database", "is read-only"),
    ("not a database", "is not a SQLite database"),
    ("malformed", "is damaged: SQLite finds its image malformed"),
    ("disk is full", "cannot grow: the disk is full"),
    ("53100", "cannot grow: the disk is full"),
    ("unable to open database file", "cannot be opened"),
    ("disk i/o error", "cannot be read or written: I/O error"),
)
_VIOLATIONS: Final = {
    "SQLITE_CONSTRAINT_FOREIGNKEY": "foreign key",
    "SQLITE_CONSTRAINT_PRIMARYKEY": "unique",
    "SQLITE_CONSTRAINT_UNIQUE": "unique",
    "23503": "foreign key",
    "23505": "unique",
}
_READING: Final[dict[str, dict[str, str]]] = {
    "sqlite": {},
    "postgresql": {"isolation_level": "REPEATABLE READ"},  # SQLite's own: every query of a transaction sees one state
}


def make_engine(url: str | Path, *, create: bool) -> tuple[Engine, str]:
    """Engine for a path (SQLite) or a `sqlite:` or `postgresql:` URL, and the name that errors give the store.

    Raises StoreError for another kind of database, a driver that is not installed, a path that cannot hold a file and,
    with `create=False`, one that holds none. Connecting raises it for a database in memory, and for a file that is no
    longer the one that was connected to first.
    """
    where = make_store_url(url)
    name = store_name(where)
    if where.get_backend_name() == "sqlite":
        check_file(where, name, create)
        # isolation_level None: sqlite3 begins no transactions of its own, the "begin" event below does.
        arguments = {"timeout": BUSY_TIMEOUT_S, "isolation_level": None}
        engine = create_engine(readable(where), connect_args=arguments, poolclass=QueuePool)
        file = _DatabaseFile(name)
        event.listen(engine, "do_connect", file.check_same)
        event.listen(engine, "connect", file.learn)
        event.listen(engine, "connect", _set_pragmas)
        if (path := file_of(where)) is not None:
            bound_steps(engine, path)
        event.listen(engine, "begin", file.check_same)
        event.listen(engine, "begin", _begin)
        return engine, name
    try:
        from flywheel.store.postgres import bound, limits

        check_parameters(where, name)
        unsaid = {name: value for name, value in limits(BUSY_TIMEOUT_S, ANSWER_S).items() if name not in where.query}
        engine = create_engine(where, connect_args=unsaid)
    except ImportError:
        raise StoreError(f"store {name}: its driver psycopg is not installed: {install_line('postgres')}") from None
    bound(engine, ANSWER_S)
    return engine, name


@contextmanager
def reading(engine: Engine, name: str) -> Iterator[Connection]:
    """A connection in a transaction. All its queries see one state of the store. Raises StoreError."""
    options = _READING[engine.dialect.name]
    with reported(name), engine.connect().execution_options(**options) as connection:
        yield connection


@contextmanager
def writing(engine: Engine, name: str) -> Iterator[Connection]:
    """A connection in a transaction, which on SQLite holds the write lock from its start. Raises StoreError."""
    with reported(name), engine.connect().execution_options(**{_WRITES: True}) as connection, connection.begin():
        yield connection


@contextmanager
def reported(name: str) -> Iterator[None]:
    """Turn errors of the database and its driver into a StoreError that names the store."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, UnicodeError, OverflowError) as error:
        raise StoreError(f"store {name}: {_fact(error)}") from error


def violated(error: IntegrityError) -> str | None:
    """The kind of constraint that an insertion broke: "foreign key" or "unique"; None for any other kind."""
    code = getattr(error.orig, "sqlite_errorname", None) or getattr(error.orig, "sqlstate", None)
    return _VIOLATIONS.get(code or "")


def _fact(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    text = str(cause)
    searched = (getattr(cause, "sqlstate", None) or text).lower()
    for needle, fact in _FACTS:
        if needle in searched:
            return fact.format(limit=BUSY_TIMEOUT_S, answer=ANSWER_S)
    if getattr(error, "connection_invalidated", False):
        return "lost the connection to its server"
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


class _DatabaseFile:
    """The file of a SQLite store. It must stay the same: SQLite would go on writing to a removed file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._path = ""
        self._identity: tuple[int, int] | None = None

    def learn(self, connection: sqlite3.Connection, _record: object) -> None:
        """Remember the file of the first connection. Raises StoreError for a database without a file."""
        self._path = connection.execute("PRAGMA database_list").fetchone()[2]
        if not self._path:
            raise StoreError(f"store {self._name}: is in memory and would end with the process; give a file")
        self._identity = self._identity or self._find()
        self.check_same()

    def check_same(self, *_event: object) -> None:
        """Raises StoreError if the path leads to another file than the first connection found."""
        if self._identity is not None and self._find() != self._identity:
            raise StoreError(f"store {self._name}: its file was removed or replaced while it was open")

    def _find(self) -> tuple[int, int] | None:
        try:
            found = Path(self._path).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _set_pragmas(connection: Any, _record: object) -> None:
    for pragma in ("foreign_keys=ON", "synchronous=NORMAL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
