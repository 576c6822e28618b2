"""The engine's requests in the application's event loop: yields their pieces until the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

from starlette.requests import Request

from flywheel.runtime.sequences import PromptRead
from flywheel.serve.answers import Piece
from flywheel.serve.engine import Died, Engine, Heard
from flywheel.serve.metrics import Metrics
from flywheel.serve.worker import AnswerPiece, Ask, Begun, Ended, Refused

_POLL_S: Final = 0.25
"""Interval at which a request without a stream checks whether its client is still connected."""

_T = TypeVar("_T")


class FailedError(Exception):
    """A request that failed. `status` is the HTTP status; `code` is OpenAI's error code, if there is one."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Asked:
    """One request to the engine, and its answers in the application's event loop. Raises as `Engine.ask`."""

    def __init__(self, engine: Engine, metrics: Metrics, ask: Ask) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[Heard] = asyncio.Queue()
        self._last_at = time.perf_counter()
        self.prompt_tokens, self.made, self.finish = 0, 0, "length"
        self.prompt_read = PromptRead(0, 0)
        self._number: int | None = engine.ask(ask, self._hear)

    def _hear(self, said: Heard) -> None:
        try:
            self._loop.call_soon_threadsafe(self._heard.put_nowait, said)
        except RuntimeError:  # the event loop has ended, so nobody waits
            return

    async def begin(self, request: Request) -> None:
        """Wait until the request is being answered, so that a refusal can have its own HTTP status. Raises FailedError,
        also if the client has disconnected."""
        with ExitStack() as undo:
            undo.callback(self.drop)
            said = await _unless_left(request, self._next())
            undo.pop_all()
        assert isinstance(said, Begun)
        self.prompt_tokens = said.prompt_tokens

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of the answer, as they come."""
        while not isinstance(said := await self._next(), Ended):
            assert isinstance(said, AnswerPiece)
            if said.piece.token_id is not None:
                self.made += 1
                now = time.perf_counter()
                self._metrics.token(now - self._last_at, first=self.made == 1)
                self._last_at = now
            yield said.piece
        self.finish, self.prompt_read = said.finish, said.prompt_read
        self._over("ok")

    async def whole(self, request: Request) -> list[Piece]:
        """The whole answer. Raises FailedError, also if the client has disconnected."""
        return await _unless_left(request, self._collect())

    async def _collect(self) -> list[Piece]:
        return [piece async for piece in self.pieces()]

    def drop(self) -> None:
        """Cancel the request."""
        if self._number is not None:
            self._engine.cancel(self._number)
            self._over("left")

    def _over(self, end: str) -> None:
        self._number = None
        self._metrics.ended(self.prompt_tokens, self.made, self.prompt_read, end)

    async def _next(self) -> Begun | AnswerPiece | Ended:
        said = await self._heard.get()
        if isinstance(said, Refused):
            self._over("refused" if said.usage else "failed")
            code = "context_length_exceeded" if said.long else None
            raise FailedError(400 if said.usage else 500, said.why, code)
        if isinstance(said, Died):
            self._over("died")
            raise FailedError(500, said.why)
        return said


async def _unless_left(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`. Raises FailedError if the client disconnects first."""
    gone, working = asyncio.ensure_future(_left(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise FailedError(499, "the client has left")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _left(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(_POLL_S)


class AllAsked:
    """The engine requests of one client request, in the order of its choices. Raises as `Engine.ask`."""

    def __init__(self, engine: Engine, metrics: Metrics, asks: Sequence[Ask]) -> None:
        with ExitStack() as undo:
            undo.callback(self.drop)
            self.each: list[Asked] = []
            for ask in asks:
                self.each.append(Asked(engine, metrics, ask))
            undo.pop_all()

    async def begin(self, request: Request) -> None:
        """See `Asked.begin`; waits for all requests."""
        with ExitStack() as undo:
            undo.callback(self.drop)
            for asked in self.each:
                await asked.begin(request)
            undo.pop_all()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece | None]]:
        """(choice, piece) as they come; None after the last piece of a choice."""
        if len(self.each) == 1:
            async for piece in self.each[0].pieces():
                yield 0, piece
            yield 0, None
            return
        came: asyncio.Queue[tuple[int, Piece | FailedError | None]] = asyncio.Queue()

        async def hear(place: int, asked: Asked) -> None:
            try:
                async for piece in asked.pieces():
                    came.put_nowait((place, piece))
                came.put_nowait((place, None))
            except FailedError as problem:
                came.put_nowait((place, problem))

        hearing = [asyncio.ensure_future(hear(place, asked)) for place, asked in enumerate(self.each)]
        try:
            left = len(hearing)
            while left:
                place, said = await came.get()
                if isinstance(said, FailedError):
                    raise said
                left -= said is None
                yield place, said
        finally:
            for each in hearing:
                each.cancel()

    def drop(self) -> None:
        """Cancel all requests."""
        for asked in self.each:
            asked.drop()
