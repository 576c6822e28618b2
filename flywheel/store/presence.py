"""Which of the runs that share a store are alive. Each run holds a lock, which ends with the run's process.

Beside a SQLite file, every run locks a file of its own: all processes that write to the store are on one machine. On a
server, every run holds an advisory lock in a session of its own. Source: flock(2); PostgreSQL, explicit locking.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Final, Protocol

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from flywheel.errors import StoreError
from flywheel.store.engine import reported

_LOCKS: Final = 0x666C7772
"""First half of the keys of our advisory locks; the other half is a run's number."""
_HELD: Final = text(
    "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = :locks AND objsubid = 2 AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_HOLD: Final = text("SELECT pg_advisory_lock(:locks, :run)")


class Presence(Protocol):
    """Shows other runs that one run is alive, from its creation until `end` or the end of its process."""

    run: int
    """Its number, drawn at random."""

    def renew(self) -> None:
        """Take the lock again if it was lost, so that other runs see this run. Raises StoreError."""
        ...

    def alive(self) -> set[int]:
        """The numbers of the live runs, this one included. Raises StoreError."""
        ...

    def end(self) -> None:
        """End the run: give up its lock."""
        ...


def enter(engine: Engine, name: str) -> Presence:
    """Begin a run on a store; `name` is the store's name in errors. Raises StoreError."""
    if engine.dialect.name == "sqlite":
        with reported(name), engine.connect() as connection:
            file: str = connection.exec_driver_sql("PRAGMA database_list").fetchone()[2]  # type: ignore[index]
        try:
            return _LockedFile(Path(file))
        except OSError as error:
            raise StoreError(f"store {name}: {error.filename or file}: {error.strerror}") from error
    return _LockSession(engine, name)


class _LockedFile:
    def __init__(self, store: Path) -> None:
        self._store, self._prefix = store, f"{store.name}-run-"
        self.alive()  # sweeps up after those that were killed
        self.run = secrets.randbits(31)
        self._descriptor = self._lock(self._path(self.run))

    def _path(self, run: int) -> Path:
        return self._store.with_name(f"{self._prefix}{run}")

    @staticmethod
    def _lock(path: Path) -> int:
        """Lock a file and return its descriptor. Another run may remove the file before it is locked; then this tries
        again."""
        while True:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def renew(self) -> None:
        """Nothing to do: the lock lasts as long as the process."""

    def alive(self) -> set[int]:
        found = set()
        for path in self._store.parent.iterdir():
            number = path.name.removeprefix(self._prefix)
            if number != path.name and number.isdecimal() and _is_locked(path):
                found.add(int(number))
        return found

    def end(self) -> None:
        self._path(self.run).unlink(missing_ok=True)
        os.close(self._descriptor)


def _is_locked(path: Path) -> bool:
    """Whether a process holds a run's file. An unreadable file counts as held. Removes a file that none holds.
    A pipe, a link or a folder of that name is no run's, and stays."""
    try:
        if not S_ISREG(path.lstat().st_mode):
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        with suppress(FileNotFoundError, PermissionError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:  # else another run has this name now
                path.unlink()
        return False
    finally:
        os.close(descriptor)


class _LockSession:
    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self.run = secrets.randbits(31)
        self._connection = self._hold()

    def _hold(self) -> Connection:
        with reported(self._name):
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(_HOLD, {"locks": _LOCKS, "run": self.run})
            return connection

    def renew(self) -> None:
        """Open the session again if it has ended: a restart of the server ends it, and its lock."""
        from psycopg import Error

        from flywheel.store.postgres import BoundedConnection, ping

        try:
            held = self._connection.connection.driver_connection
            assert isinstance(held, BoundedConnection)
            ping(held)
        except (Error, SQLAlchemyError):
            self.end()
            self._connection = self._hold()

    def alive(self) -> set[int]:
        with reported(self._name):
            return set(self._connection.execute(_HELD, {"locks": _LOCKS}).scalars())

    def end(self) -> None:
        """Close the session, which gives up the lock. Sends nothing to the server, which may not answer."""
        if not self._connection.closed:
            self._connection.invalidate()
            self._connection.close()
