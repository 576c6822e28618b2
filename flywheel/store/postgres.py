"""Connections to a PostgreSQL server that may stop answering: every wait for it is bounded from this side.

A server that is stopped, or whose machine is gone, keeps its connections open: no error ever comes.
Source: psycopg 3, `Connection.wait`; libpq's connection parameters.
"""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import Any, Final, TypeVar

import psycopg
from psycopg import waiting
from psycopg.abc import PQGen
from sqlalchemy import Engine, event
from sqlalchemy.exc import DisconnectionError

_T = TypeVar("_T")

PING_S: Final = 5.0
"""Seconds that the server may take to answer on an idle connection before a new connection replaces it."""
SILENT: Final = "the server gave no answer"
"""The text of the error when a wait is given up."""

_INTERVAL_S: Final = 0.1


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that closes itself if the server takes longer than `answer_s` seconds to answer, or if a signal
    handler raises during the wait. A live server ends the session when it next tries to answer."""

    answer_s: float = inf

    def wait(self, gen: PQGen[_T], interval: float = _INTERVAL_S, timeout: float | None = None) -> _T:
        """Wait as psycopg does, but with an end: psycopg waits without a limit, and after an interrupt it waits for the
        answer to its request to cancel.

        Raises OperationalError.
        """
        patience_s = self.answer_s if timeout is None else min(timeout, self.answer_s)
        try:
            return waiting.wait(_until(gen, monotonic() + patience_s), self.pgconn.socket, min(interval, _INTERVAL_S))
        except (KeyboardInterrupt, _SilentError):
            self.pgconn.finish()
            raise


class _SilentError(psycopg.OperationalError):
    """The server took too long."""


def _until(gen: PQGen[_T], deadline: float) -> PQGen[_T]:
    """Pass on what `gen` waits for. Raises _SilentError after the `deadline`, which it checks at every interval."""
    ready = None
    while True:
        try:
            wanted = gen.send(ready)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            value: _T = end.value
            return value
        ready = yield wanted
        if not ready and monotonic() >= deadline:
            raise _SilentError(SILENT)


def ping(connection: BoundedConnection) -> None:
    """Ask the server for an answer. Raises psycopg's Error if the connection, which is in no transaction, is broken."""
    usual, connection.answer_s = (connection.autocommit, connection.answer_s), PING_S
    try:
        connection.autocommit = True
        connection.execute("SELECT 1")
    finally:
        connection.answer_s = usual[1]
        if not connection.closed:
            connection.autocommit = usual[0]


def limits(lock_s: float, answer_s: float) -> dict[str, Any]:
    """Parameters of a connection that waits at most `lock_s` seconds for a server and for a lock, and whose statements
    take at most `answer_s` seconds."""
    return {
        "connect_timeout": lock_s,
        "options": f"-c lock_timeout={lock_s}s -c statement_timeout={answer_s:.0f}s",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 4,
        "tcp_user_timeout": int(1000 * lock_s),
    }


def bound(engine: Engine, answer_s: float) -> None:
    """Give the engine bounded connections, and have it check an idle connection before it uses the connection."""

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: Any, arguments: Any, parameters: Any) -> BoundedConnection:
        made = BoundedConnection.connect(*arguments, **parameters)
        made.answer_s = answer_s
        return made

    @event.listens_for(engine, "checkout")
    def check(connection: BoundedConnection, record: Any, proxy: Any) -> None:
        if not record.info.pop("idle", False):
            return
        try:
            ping(connection)
        except psycopg.Error as error:
            raise DisconnectionError(str(error)) from error

    @event.listens_for(engine, "checkin")
    def idle(connection: BoundedConnection | None, record: Any) -> None:
        record.info["idle"] = True
