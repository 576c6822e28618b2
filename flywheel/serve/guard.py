"""What stands around the application: refusals that need no look at a request's body, and the log."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final

from starlette.responses import JSONResponse

from flywheel.serve.openai import error

MAX_BODY: Final = 16 * 2**20
"""Bytes of a request: far more than any context."""

_AsgiMessage = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_AsgiMessage]]
_Send = Callable[[_AsgiMessage], Awaitable[None]]


_TOKENS: Final = "prompt_tokens={prompt_tokens} tokens={completion_tokens} "
_SHOWN_PATH: Final = 200
"""Characters of a path in a line of the log."""
_END: Final[_AsgiMessage] = {"type": "http.response.body", "body": b"", "more_body": False}
_SHUTTING_DOWN: Final = JSONResponse(error("the server is shutting down", "server_error"), 503)


class Log:
    """Middleware that tells `log` about each request: never what it says."""

    def __init__(self, app: Callable[..., Awaitable[None]], log: Callable[[str], None]) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: _AsgiMessage, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 500, time.perf_counter()  # of a request that no handler answers

        async def seen(message: _AsgiMessage) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            path = scope["raw_path"].decode("ascii", "backslashreplace")[:_SHOWN_PATH]
            usage = scope.get("state", {}).get("usage")
            tokens = "" if usage is None else _TOKENS.format(**usage())
            self._log(f"{scope['method']} {path} {status} {tokens}ms={1e3 * (time.perf_counter() - start):.0f}")


class Guard:
    """Middleware that refuses requests without the key and requests that are too long, and ends those that the server
    cuts off when it ends."""

    def __init__(self, app: Callable[..., Awaitable[None]], api_key: str | None) -> None:
        self._app, self._key = app, api_key

    async def __call__(self, scope: _AsgiMessage, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        wanted = None if self._key is None else b"Bearer " + self._key.encode()
        guarded = wanted is not None and scope["path"].startswith("/v1/") and scope["method"] != "OPTIONS"
        if guarded and not hmac.compare_digest(given, wanted or b""):
            response = JSONResponse(error("no valid API key", "authentication_error", "invalid_api_key"), 401)
            await response(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY:
            response = JSONResponse(error(f"body: more than {MAX_BODY} bytes"), 413)
            await response(scope, receive, send)
            return
        taken, begun, ended = 0, False, False

        async def counted() -> _AsgiMessage:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            return message if taken <= MAX_BODY else {"type": "http.disconnect"}

        async def passed(message: _AsgiMessage) -> None:
            nonlocal begun, ended
            if taken <= MAX_BODY:
                begun = True
                ended = message["type"] == "http.response.body" and not message.get("more_body", False)
                await send(message)

        try:
            await self._app(scope, counted, passed)
        except asyncio.CancelledError:  # the server ends and waits no longer; a traceback would say no more
            if ended:
                return
            with suppress(asyncio.CancelledError):
                await (send(_END) if begun else _SHUTTING_DOWN(scope, receive, send))
            return
        if taken > MAX_BODY:
            await JSONResponse(error(f"body: more than {MAX_BODY} bytes"), 413)(scope, receive, send)
