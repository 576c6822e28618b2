"""The process that decodes for a server: it owns the device, and may die without taking the server along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from flywheel.decode.sampling import Sampling
from flywheel.errors import FlywheelError, GpuFaultError, UsageError
from flywheel.process import enter_child
from flywheel.serve.decoder import Decoder, Finish, Piece

MakeDecoder = Callable[[], Decoder]
"""Picklable; called once, in the worker."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request by its number: to continue `prompt` (text or ids) or to answer `messages`, of which one is None."""

    number: int
    prompt: str | tuple[int, ...] | None
    messages: tuple[Mapping[str, str], ...] | None
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_end: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants a request any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker decodes now."""

    model: str
    schedule: str
    context: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A request fits and is being answered."""

    number: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer."""

    number: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer is whole."""

    number: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class Refused:
    """A request cannot be answered, or the worker cannot start (`number` None). `usage`: by its own fault."""

    number: int | None
    why: str
    usage: bool


Said = Loaded | Begun | Part | Ended | Refused


def work(connection: Connection, make_decoder: MakeDecoder) -> None:
    """The worker's main: answers requests in their order until its parent hangs up."""
    enter_child()
    try:
        decoder = make_decoder()
    except FlywheelError as error:
        connection.send(Refused(None, str(error), True))
        return
    with decoder:
        connection.send(Loaded(decoder.name, decoder.schedule, decoder.context))
        waiting: deque[Ask] = deque()
        while _take(connection, waiting, wait=not waiting):
            if waiting:
                _answer(connection, decoder, waiting.popleft(), waiting)


def _answer(connection: Connection, decoder: Decoder, ask: Ask, waiting: deque[Ask]) -> None:
    try:
        if ask.messages is not None:
            prompt = decoder.chat(ask.messages)
        else:
            prompt = decoder.encode(ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt or ()))
        room = decoder.context - len(prompt) + 1
        if room < 1:
            raise UsageError(f"prompt: its {len(prompt)} tokens do not fit the context of {decoder.context}")
        answer = decoder.generate(
            prompt, max_tokens=room if ask.max_tokens is None else ask.max_tokens, sampling=ask.sampling,
            stop=ask.stop, ignore_end=ask.ignore_end,
        )  # fmt: skip
        connection.send(Begun(ask.number, answer.prompt_tokens))
        for piece in answer:
            connection.send(Part(ask.number, piece))
            if not _take(connection, waiting, wait=False, current=ask.number):
                answer.close()
                return
    except GpuFaultError:
        raise  # nothing on the GPU works in this process any more: its end says so
    except FlywheelError as error:
        connection.send(Refused(ask.number, str(error), isinstance(error, UsageError)))
        return
    connection.send(Ended(ask.number, answer.finish or "length"))


def _take(connection: Connection, waiting: deque[Ask], *, wait: bool, current: int | None = None) -> bool:
    """Put what has come into `waiting`, and take what was cancelled out of it. False where `current` was cancelled or,
    without one, the parent has hung up."""
    try:
        while wait or connection.poll():
            wait = False
            said = connection.recv()
            if isinstance(said, Ask):
                waiting.append(said)
            elif said.number == current:
                return False
            else:
                kept = [ask for ask in waiting if ask.number != said.number]
                waiting.clear()
                waiting.extend(kept)
    except EOFError:
        return False
    return True
