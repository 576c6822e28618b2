"""Runs the application on a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flywheel.errors import FlywheelError, UsageError
from flywheel.process import most_descriptors
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
_BESIDE: Final = 1000
"""Connections that may be open beside those of a full queue."""
_SAY_AGAIN_S: Final = 60.0
"""Seconds before a line about connections is written again: strangers cause them."""


class _Listener(socket.socket):
    """A listening socket that leaves descriptors for the rest of the server."""

    highest = sys.maxsize
    """A connection with this descriptor or a higher one is closed at once. The system gives the lowest free one, so
    about as many are in use."""
    _failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Called by the event loop until it raises BlockingIOError. CPython 3.11 also goes on after an error, for which
        it has stopped listening for a second, and hands over the same error thousands of times."""
        if self._failed:
            self._failed = False
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except BlockingIOError:
            raise
        except OSError:
            self._failed = True
            raise
        if connection.fileno() >= self.highest:
            connection.close()
            raise BlockingIOError  # one a turn of the loop, so that a flood leaves it time for others
        return connection, address


class _Seldom:
    """Passes a line on to `say`, each at most once in _SAY_AGAIN_S."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at: dict[str, float] = {}

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._said_at.get(line, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said_at[line] = now
            self._say(line)

    def fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles the event loop's errors: those of accepting a connection in one line, without a traceback."""
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError):
            self(f"no connection can be accepted: {error.strerror}; the server tries again every second")
        else:
            loop.default_exception_handler(context)


@contextmanager
def bound(host: str, port: int) -> Iterator[_Listener]:
    """A listening socket, bound before the slow loading starts. Raises UsageError if it cannot be bound."""
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = undo.enter_context(_Listener(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # a reader of the address may connect at once
        except OSError as error:
            raise UsageError(f"cannot listen at {host} port {port}: {error.strerror or error}") from None
        yield listener


class _Timed(H11Protocol):
    """A connection that is closed unless its requests arrive in time. uvicorn has a limit for idle ones only. If more
    than `most` connections are open, the one that has waited for its request the longest is closed for a new one."""

    _late: asyncio.TimerHandle | None = None
    _awaited: object = None

    def __init__(self, most: int, say: Callable[[str], None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._most, self._say = most, say

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called once."""
        super().connection_made(transport)
        self._await()
        if len(self.connections) > self._most:
            self._say(f"{self._most} connections are open, the most; one without a request is closed for each new one")
            ends = [(each._late.when(), each) for each in self.connections if isinstance(each, _Timed) and each._late]
            min(ends, key=lambda pair: pair[0])[1]._give_way()

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

    def _give_way(self) -> None:
        if self._late is not None:  # so that it is not chosen again
            self._late.cancel()
            self._late = None
        self.transport.abort()

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
    engine: Engine, name: str, api_key: str | None, listener: _Listener, say: Callable[[str], None],
    origins: Sequence[str] = (), log: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Serve until SIGINT or SIGTERM, as `make_app`. `say` gets a line about too many connections. Raises FlywheelError
    once the engine has failed."""

    async def look() -> None:
        server.should_exit = server.should_exit or engine.failed is not None

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(seldom.fault)
        await server.serve(sockets=[listener])

    seldom = _Seldom(say)
    descriptors = most_descriptors()
    listener.highest = descriptors * 3 // 4
    http: Any = partial(_Timed, min(engine.most + _BESIDE, descriptors // 2), seldom)
    config = uvicorn.Config(  # uvicorn's warnings are about requests of strangers, whose answers say the same
        make_app(engine, name, api_key, origins, log), http=http, ws="none", log_level="error", access_log=False,
        backlog=_BACKLOG, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_GRACE_S, server_header=False,
        callback_notify=look, timeout_notify=_LOOK_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    asyncio.run(serve())
    if engine.failed is not None:
        raise FlywheelError(f"the server ends, since no decoding process runs any more: {engine.failed}")
