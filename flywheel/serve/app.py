"""The ASGI application: OpenAI's API over an Engine, with health and metrics."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Lifespan

from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.asking import AllAsked, FailedError
from flywheel.serve.engine import Engine, FullError
from flywheel.serve.fields import MalformedError, shown
from flywheel.serve.guard import Guard, Log
from flywheel.serve.metrics import Metrics
from flywheel.serve.openai import (
    ChatRequest,
    CompletionRequest,
    choice,
    chunk,
    error,
    logprobs_of,
    new_id,
    read,
    usage_of,
    whole,
)

_READ: Final = ["GET", "HEAD"]


def make_app(
    engine: Engine, name: str, api_key: str | None = None, origins: Sequence[str] = (),
    log: Callable[[str], None] | None = None,
) -> FastAPI:  # fmt: skip
    """The application over a started engine. `name` is the model's name in answers. Pages of `origins` may read
    answers; "*" stands for all pages. `log` gets a line about each request. The application closes the engine when it
    ends."""
    metrics = Metrics(engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = _bare_app(lifespan, api_key, origins, log)

    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        why = engine.unable
        if why is not None:
            return JSONResponse({"status": "unable", "why": why}, 503)
        return JSONResponse({"status": "full" if engine.waiting >= engine.most else "ok"})

    @app.api_route("/metrics", methods=_READ)
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [own]}

    @app.api_route("/v1/models/{asked:path}", methods=_READ)
    async def model(asked: str) -> Response:
        return JSONResponse(own) if asked == name else _unknown_model(asked, name)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = read(CompletionRequest, await _body(request))
        return await _respond(engine, metrics, name, asked, request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = read(ChatRequest, await _body(request))
        return await _respond(engine, metrics, name, asked, request, chat=True)

    own = {
        "id": name, "object": "model", "created": int(time.time()), "owned_by": "flywheel",
        "max_model_len": engine.context,
    }  # fmt: skip
    return app


def _bare_app(
    lifespan: Lifespan[FastAPI], api_key: str | None, origins: Sequence[str], log: Callable[[str], None] | None
) -> FastAPI:
    """The application without paths."""
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, api_key=api_key)
    if origins:  # outside of the guard, so that a page can read its refusals; a preflight never has the key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "HEAD", "POST"], allow_headers=["*"]
        )
    if log is not None:
        app.add_middleware(Log, log=log)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


async def _body(request: Request) -> bytes:
    """The body of a request of JSON. Another content type is refused: a page of any origin may send those without a
    preflight, even to a server that only this machine reaches."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"Content-Type: {shown(kind) if kind else 'none'} is not application/json")
    try:
        return await request.body()
    except ClientDisconnect:
        raise FailedError(499, "the client has left") from None


def _unknown_model(asked: str, name: str) -> Response:
    why = f"model: {asked[:100]!r} is not served here; {name!r} is"
    return JSONResponse(error(why, code="model_not_found", param="model"), 404)


async def _malformed(_: Request, problem: MalformedError) -> Response:
    return JSONResponse(error(str(problem), param=problem.field), 400)


async def _refused(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), param=_field(str(problem))), 400)


async def _full(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), "rate_limit_error", "overloaded"), 429, {"Retry-After": "1"})


async def _unable(_: Request, problem: Exception) -> Response:
    return JSONResponse(error(str(problem), "server_error"), 503)


async def _other(request: Request, problem: HTTPException) -> Response:
    if problem.status_code == 405:
        able = sorted({"OPTIONS", *re.findall(r"\w+", (problem.headers or {}).get("Allow", ""))})
        problem.headers = {"Allow": ", ".join(able)}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=problem.headers)
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
    MalformedError: _malformed, UsageError: _refused, FullError: _full, FlywheelError: _unable,
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
    request.state.usage = partial(_usage, asked, answers)
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
        sum(each.prompt_read.reused for each in prompts),
    )  # fmt: skip


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"  # ASCII: many clients split lines at U+2028, too
