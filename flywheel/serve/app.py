"""The ASGI application: OpenAI's API over an Engine, with health and metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.asking import AllAsked, FailedError
from flywheel.serve.engine import Engine, FullError
from flywheel.serve.fields import told
from flywheel.serve.metrics import Metrics
from flywheel.serve.openai import (
    ChatRequest,
    CompletionRequest,
    choice,
    chunk,
    error,
    logprobs_of,
    new_id,
    usage_of,
    whole,
)

MAX_BODY: Final = 16 * 2**20
"""Bytes of a request: far more than any context."""


def make_app(engine: Engine, name: str, api_key: str | None = None) -> FastAPI:
    """The application over a started engine. `name` is the model's name in answers. The application closes the engine
    when it ends."""
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
        why = engine.unable
        if why is not None:
            return JSONResponse({"status": "unable", "why": why}, 503)
        return JSONResponse({"status": "full" if engine.waiting >= engine.most else "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [own]}

    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> Response:
        return JSONResponse(own) if asked == name else _unknown_model(asked, name)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await _respond(engine, metrics, name, asked, request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await _respond(engine, metrics, name, asked, request, chat=True)

    own = {
        "id": name, "object": "model", "created": int(time.time()), "owned_by": "flywheel",
        "max_model_len": engine.context,
    }  # fmt: skip
    return app


def _unknown_model(asked: str, name: str) -> Response:
    why = f"model: {asked[:100]!r} is not served here; {name!r} is"
    return JSONResponse(error(why, code="model_not_found", param="model"), 404)


async def _malformed(_: Request, problem: Any) -> Response:
    field, why = told(problem.errors()[0])
    return JSONResponse(error(why, param=field), 400)


async def _refused(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), param=_field(str(problem))), 400)


async def _full(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), "rate_limit_error", "overloaded"), 429, {"Retry-After": "1"})


async def _unable(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), "server_error"), 503)


async def _other(_: Request, problem: HTTPException) -> Response:
    return JSONResponse(error(str(problem.detail)[:300]), problem.status_code, problem.headers)


async def _bug(_: Request, problem: Exception) -> Response:
    return JSONResponse(error("the server failed; its log says why", "server_error"), 500)


async def _failed(_: Request, problem: Any) -> Response:
    why = str(problem)
    if problem.status == 400:
        return JSONResponse(error(why, code=problem.code, param=_field(why)), 400)
    return JSONResponse(error(why, "server_error", problem.code), problem.status)


def _field(why: str) -> str | None:
    """The field that a refusal names, None where it names none."""
    named = re.match(r"([\w.]+): ", why)
    return None if named is None else named[1]


_HANDLERS: Final[dict[Any, Callable[[Request, Any], Awaitable[Response]]]] = {
    RequestValidationError: _malformed, UsageError: _refused, FullError: _full, FlywheelError: _unable,
    FailedError: _failed, HTTPException: _other, Exception: _bug,
}  # fmt: skip
"""Exception -> the handler that turns it into a response."""


async def _respond(
    engine: Engine, metrics: Metrics, name: str, asked: CompletionRequest | ChatRequest, request: Request, chat: bool
) -> Response:
    if asked.model != name:
        return _unknown_model(asked.model, name)
    head = {"id": new_id(chat), "created": int(time.time()), "model": name}
    answers = AllAsked(engine, metrics, asked.asks(engine.most))
    await answers.begin(request)
    if asked.stream:
        return StreamingResponse(_events(asked, answers, chat, head), media_type="text/event-stream")
    try:
        all_pieces = [await answer.whole(request) for answer in answers.each]
        choices = [
            choice(chat, place, "".join(piece.text for piece in pieces), answer.finish, logprobs_of(chat, pieces))
            for place, (answer, pieces) in enumerate(zip(answers.each, all_pieces, strict=True))
        ]
        return JSONResponse(whole(chat, head, choices, _usage(asked, answers)))
    finally:
        answers.drop()


async def _events(
    asked: CompletionRequest | ChatRequest, answers: AllAsked, chat: bool, head: dict[str, Any]
) -> AsyncIterator[str]:
    """The pieces of all choices as server-sent events."""
    offsets = [0] * len(answers.each)
    try:
        if chat:
            for place in range(len(offsets)):
                yield _event(chunk(chat, head, place, "", first=True))
        async for place, piece in answers.pieces():
            if piece is None:
                yield _event(chunk(chat, head, place, None, answers.each[place].finish))
                continue
            if piece.text or (piece.likely is not None and not piece.ends):
                likely = logprobs_of(chat, [piece], offsets[place])
                yield _event(chunk(chat, head, place, piece.text, logprobs=likely))
            offsets[place] += 0 if piece.likely is None else len(piece.likely.text)
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield _event({**chunk(chat, head, 0, None), "choices": [], "usage": _usage(asked, answers)})
    except FailedError as problem:
        yield _event(error(str(problem), "server_error"))
    finally:
        answers.drop()
    yield "data: [DONE]\n\n"


def _usage(asked: CompletionRequest | ChatRequest, answers: AllAsked) -> dict[str, Any]:
    """Token counts of all choices. A prompt counts once, however many choices it has."""
    prompts = answers.each[:: asked.choices]
    return usage_of(
        sum(each.prompt_tokens for each in prompts), sum(each.made for each in answers.each),
        sum(each.reused_tokens for each in prompts),
    )  # fmt: skip


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


_END: Final[_Message] = {"type": "http.response.body", "body": b"", "more_body": False}
_SHUTTING_DOWN: Final = JSONResponse(error("the server is shutting down", "server_error"), 503)


class _Guard:
    """Middleware that refuses requests without the key and requests that are too long, and ends those that the server
    cuts off when it ends."""

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
        taken, begun, ended = 0, False, False

        async def counted() -> _Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            return message if taken <= MAX_BODY else {"type": "http.disconnect"}

        async def passed(message: _Message) -> None:
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
