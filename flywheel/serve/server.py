"""Runs the application on a socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.app import make_app
from flywheel.serve.engine import Engine
from flywheel.serve.openai import error

_BACKLOG: Final = 2048
_GRACE_S: Final = 3
"""Seconds that running answers may take when the server shuts down."""
_KEEP_ALIVE_S: Final = 5
"""Seconds after which a connection without a request is closed."""
_LIMITS: Final[Mapping[object, tuple[str, float]]] = MappingProxyType({
    h11.IDLE: ("headers: the rest of them", 10.0), h11.SEND_BODY: ("body: the rest of it", 60.0),
})  # fmt: skip
"""What the server waits for -> its name, and the seconds that all of it may take."""
_LOOK_S: Final = 1
"""Seconds between two looks whether the engine has failed."""


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, bound before the slow loading starts. Raises UsageError if it cannot be bound."""
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # a reader of the address may connect at once
        except OSError as error:
            raise UsageError(f"cannot listen at {host} port {port}: {error.strerror or error}") from None
        yield listener


class _Timed(H11Protocol):
    """A connection that is closed unless its requests arrive in time. uvicorn has a limit for idle ones only."""

    _late: asyncio.TimerHandle | None = None
    _awaited: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called once."""
        super().connection_made(transport)
        self._await()

    def data_received(self, data: bytes) -> None:
        """Called with what has come."""
        super().data_received(data)
        self._await()

    def on_response_complete(self) -> None:
        """Called at the end of each response."""
        super().on_response_complete()
        self._await()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called once."""
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def _await(self) -> None:
        """Begin to count when the server begins to wait for headers or for a body."""
        awaited = self.conn.their_state, self.cycle
        if awaited != self._awaited:
            self._awaited = awaited
            if self._late is not None:
                self._late.cancel()
            what = _LIMITS.get(awaited[0])
            self._late = None if what is None else self.loop.call_later(what[1], self._refuse, *what)

    def _refuse(self, what: str, limit_s: float) -> None:
        if self.transport.is_closing():
            return
        begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else there is a response
            body = json.dumps(error(f"{what} did not arrive within {limit_s:g} s")).encode()
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()


def run(
    engine: Engine, name: str, api_key: str | None, listener: socket.socket, origins: Sequence[str] = (),
    log: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Serve until SIGINT or SIGTERM, as `make_app`. Raises FlywheelError once the engine has failed."""

    async def look() -> None:
        server.should_exit = server.should_exit or engine.failed is not None

    config = uvicorn.Config(
        make_app(engine, name, api_key, origins, log), http=_Timed, ws="none", log_level="warning", access_log=False,
        backlog=_BACKLOG, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_GRACE_S, server_header=False,
        callback_notify=look, timeout_notify=_LOOK_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    if engine.failed is not None:
        raise FlywheelError(f"the server ends, since no decoding process runs any more: {engine.failed}")
