"""Runs the application on a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import uvicorn

from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.app import make_app
from flywheel.serve.engine import Engine

_BACKLOG: Final = 2048
_GRACE_S: Final = 3
"""Seconds that running answers may take when the server shuts down."""
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


def run(engine: Engine, name: str, api_key: str | None, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Raises FlywheelError once the engine has failed."""

    async def look() -> None:
        server.should_exit = server.should_exit or engine.failed is not None

    config = uvicorn.Config(
        make_app(engine, name, api_key), log_level="warning", access_log=False, backlog=_BACKLOG,
        timeout_graceful_shutdown=_GRACE_S, server_header=False, callback_notify=look, timeout_notify=_LOOK_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    if engine.failed is not None:
        raise FlywheelError(f"the server ends, since no decoding process runs any more: {engine.failed}")
