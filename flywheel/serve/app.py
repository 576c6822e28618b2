"""The ASGI application: OpenAI's API over an Engine, with health and metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.answers import Piece
from flywheel.serve.engine import Died, Engine, FullError, Heard
from flywheel.serve.metrics import Metrics
from flywheel.serve.openai import ChatRequest, CompletionRequest, chunk, error, logprobs_of, new_id, usage_of, whole
from flywheel.serve.worker import Begun, Ended, Part, Refused

MAX_BODY: Final = 16 * 2**20
"""Bytes of a request: far more than any context."""

_POLL_S: Final = 0.25
"""How often a request without a stream is asked whether its client is still there."""


_T = TypeVar("_T")


class _FailedError(Exception):
    """An answer that ends without being one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(engine: Engine, name: str, api_key: str | None = None) -> FastAPI:
    """The application over a started engine; `name` is the model's in answers. It ends the engine when it ends."""
    metrics = Metrics(engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, api_key=api_key)

    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)

    @app.get("/health")
    async def health() -> Response:
        if engine.failed is not None:
            return JSONResponse({"status": "failed", "why": engine.failed}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": started, "owned_by": "flywheel"}
        return {"object": "list", "data": [own]}

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await _respond(engine, metrics, name, asked, request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await _respond(engine, metrics, name, asked, request, chat=True)

    started = int(time.time())
    return app


async def _malformed(_: Request, problem: Any) -> Response:
    first = problem.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return JSONResponse(error(f"{where[:100]}: {str(first['msg'])[:200]}"), 400)


async def _refused(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem)), 400)


async def _full(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), "rate_limit_error", "overloaded"), 429, {"Retry-After": "1"})


async def _unable(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), "server_error"), 503)


async def _other(_: Request, problem: HTTPException) -> Response:
    return JSONResponse(error(str(problem.detail)[:300]), problem.status_code, problem.headers)


async def _bug(_: Request, problem: Exception) -> Response:
    return JSONResponse(error("the server failed; its log says why", "server_error"), 500)


async def _failed(_: Request, problem: Any) -> Response:
    kind = "invalid_request_error" if problem.status == 400 else "server_error"
    return JSONResponse(error(str(problem), kind), problem.status)


_HANDLERS: Final[dict[Any, Callable[[Request, Any], Awaitable[Response]]]] = {
    RequestValidationError: _malformed, UsageError: _refused, FullError: _full, FlywheelError: _unable,
    _FailedError: _failed, HTTPException: _other, Exception: _bug,
}  # fmt: skip
"""What becomes of each exception."""


async def _respond(
    engine: Engine, metrics: Metrics, name: str, asked: CompletionRequest | ChatRequest, request: Request, chat: bool
) -> Response:
    if asked.model != name:
        why = f"model: {asked.model[:100]!r} is not served here; {name!r} is"
        return JSONResponse(error(why, code="model_not_found"), 404)
    asked.check_served()
    head = {"id": new_id(chat), "created": int(time.time()), "model": name}
    answer = _Answer(engine, metrics, asked)
    await answer.begin(request)
    if not asked.stream:
        try:
            pieces = await answer.whole(request)
            text = "".join(piece.text for piece in pieces)
            usage = usage_of(answer.prompt_tokens, answer.made, answer.reused_tokens)
            return JSONResponse(whole(chat, head, text, answer.finish, usage, logprobs_of(chat, pieces)))
        finally:
            answer.drop()

    async def events() -> AsyncIterator[str]:
        try:
            if chat:
                yield _event(chunk(chat, head, "", first=True))
            offset = 0
            async for piece in answer.pieces():
                if piece.text or (piece.likely is not None and not piece.ends):
                    likely = logprobs_of(chat, [piece], offset)
                    yield _event(chunk(chat, head, piece.text, logprobs=likely))
                offset += 0 if piece.likely is None else len(piece.likely.text)
            yield _event(chunk(chat, head, None, answer.finish))
            if asked.stream_options is not None and asked.stream_options.include_usage:
                usage = usage_of(answer.prompt_tokens, answer.made, answer.reused_tokens)
                yield _event({**chunk(chat, head, None), "choices": [], "usage": usage})
        except _FailedError as problem:
            yield _event(error(str(problem), "server_error"))
        finally:
            answer.drop()
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


class _Answer:
    """What the engine says of one request, in the application's event loop."""

    def __init__(self, engine: Engine, metrics: Metrics, asked: CompletionRequest | ChatRequest) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[Heard] = asyncio.Queue()
        self._last_at = time.perf_counter()
        self.prompt_tokens, self.made, self.finish = 0, 0, "length"
        self.reused_tokens = 0
        self._number: int | None = engine.ask(asked.ask(), self._hear)

    def _hear(self, said: Heard) -> None:
        try:
            self._loop.call_soon_threadsafe(self._heard.put_nowait, said)
        except RuntimeError:  # the loop has ended, and nobody waits
            return

    async def begin(self, request: Request) -> None:
        """Return once the request is being answered, so that what refuses it has a status of its own. Raises
        _FailedError, also where the client has left."""
        with ExitStack() as undo:
            undo.callback(self.drop)
            said = await _unless_left(request, self._next())
            undo.pop_all()
        assert isinstance(said, Begun)
        self.prompt_tokens = said.prompt_tokens

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes."""
        while not isinstance(said := await self._next(), Ended):
            assert isinstance(said, Part)
            if said.piece.token_id is not None:
                self.made += 1
                now = time.perf_counter()
                self._metrics.token(now - self._last_at, first=self.made == 1)
                self._last_at = now
            yield said.piece
        self.finish, self.reused_tokens = said.finish, said.reused_tokens
        self._over("ok")

    async def whole(self, request: Request) -> list[Piece]:
        """The whole answer. Raises _FailedError also where the client has left."""
        return await _unless_left(request, self._collect())

    async def _collect(self) -> list[Piece]:
        return [piece async for piece in self.pieces()]

    def drop(self) -> None:
        """Want no more of it."""
        if self._number is not None:
            self._engine.cancel(self._number)
            self._over("left")

    def _over(self, end: str) -> None:
        self._number = None
        self._metrics.ended(self.prompt_tokens, self.made, self.reused_tokens, end)

    async def _next(self) -> Begun | Part | Ended:
        said = await self._heard.get()
        if isinstance(said, Refused):
            self._over("refused" if said.usage else "failed")
            raise _FailedError(400 if said.usage else 500, said.why)
        if isinstance(said, Died):
            self._over("died")
            raise _FailedError(500, said.why)
        return said


async def _unless_left(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` gives. Raises _FailedError where the client leaves before."""
    gone, working = asyncio.ensure_future(_left(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _FailedError(499, "the client has left")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _left(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(_POLL_S)


_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class _Guard:
    """Refuses requests without the key, and those that are too long."""

    def __init__(self, app: Callable[..., Awaitable[None]], api_key: str | None) -> None:
        self._app, self._key = app, api_key

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        wanted = None if self._key is None else b"Bearer " + self._key.encode()
        if wanted is not None and scope["path"].startswith("/v1/") and not hmac.compare_digest(given, wanted):
            response = JSONResponse(error("no valid API key", "authentication_error", "invalid_api_key"), 401)
            await response(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY:
            response = JSONResponse(error(f"body: more than {MAX_BODY} bytes"), 413)
            await response(scope, receive, send)
            return
        taken = 0

        async def counted() -> _Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            return message if taken <= MAX_BODY else {"type": "http.disconnect"}

        async def passed(message: _Message) -> None:
            if taken <= MAX_BODY:
                await send(message)

        await self._app(scope, counted, passed)
        if taken > MAX_BODY:
            await JSONResponse(error(f"body: more than {MAX_BODY} bytes"), 413)(scope, receive, send)
