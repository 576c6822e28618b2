"""The process that decodes for a server. It owns the device. The server survives its death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from flywheel.decode.notes import Note
from flywheel.errors import ContextError, FlywheelError, TokenizerError, UsageError
from flywheel.process import enter_child
from flywheel.runtime.sequences import PromptRead, Sampling
from flywheel.serve.answers import Answer, Finish, Piece
from flywheel.serve.decoder import Decoder
from flywheel.serve.reading import Conversation, PromptReader

MakeDecoder = Callable[[], Decoder]
"""Picklable; called once, in the worker."""

BEAT_S: Final = 1.0
"""Seconds between two beats, with which a worker shows that it runs."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: continue `prompt` (text or token ids), or answer `messages`; the other one is None. `variables` are
    further ones of the chat template."""

    number: int
    prompt: str | tuple[int, ...] | None
    messages: tuple[Mapping[str, Any], ...] | None
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_end: bool = False
    reuse: bool = True
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancels a request."""

    number: int


@dataclass(frozen=True, slots=True)
class DecoderReady:
    """The worker is ready to decode."""

    model: str
    schedule: str
    context: int
    max_sequences: int
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """The request fits the context. It is answered as soon as a row is free."""

    number: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer."""

    number: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer, and how its prompt was read."""

    number: int
    finish: Finish
    prompt_read: PromptRead


@dataclass(frozen=True, slots=True)
class Refused:
    """A request cannot be answered, or the worker cannot start (`number` None). `usage`: the request is at fault;
    `long`: it does not fit the context."""

    number: int | None
    why: str
    usage: bool
    long: bool = False


Said = Begun | AnswerPiece | Ended | Refused
"""Messages about requests. All messages of one moment are sent as one list, so that the number of requests does not
matter."""


def work(connection: Connection, pulse: Connection, make_decoder: MakeDecoder) -> None:
    """Main function of the worker: answers requests, as many together as the decoder has rows, until its parent hangs
    up. From its first moment it beats on `pulse`."""
    enter_child()
    threading.Thread(target=_beat, args=(pulse,), daemon=True).start()
    try:
        decoder = make_decoder()
    except FlywheelError as error:
        connection.send(Refused(None, str(error), True))
        return
    with decoder:
        rows = decoder.max_sequences
        connection.send(DecoderReady(decoder.name, decoder.schedule, decoder.context, rows, decoder.notes))
        with PromptReader(decoder.second_tokenizer()) as reader:
            answer_all(connection, decoder, reader)


def _beat(pulse: Connection) -> None:
    with suppress(OSError):  # the parent has ended
        while True:
            pulse.send_bytes(b".")
            time.sleep(BEAT_S)


def answer_all(connection: Connection, decoder: Decoder, reader: PromptReader) -> None:
    """Answer requests until the other end hangs up, or the thread of `reader` fails. That thread tokenises texts while
    other requests decode."""
    answers: dict[int, Answer] = {}
    reading: dict[int, Ask] = {}
    while _listen(connection, decoder, reader, answers, reading):
        decoder.advance()
        said: list[Said] = []
        for number in list(answers):
            if _tell(said, number, answers[number], decoder.name):
                del answers[number]
        if said:
            connection.send(said)


def _listen(
    connection: Connection, decoder: Decoder, reader: PromptReader, answers: dict[int, Answer], reading: dict[int, Ask]
) -> bool:
    """Begin new requests and close cancelled ones; wait if there is nothing to decode. Returns False if the parent has
    hung up, or the tokenising thread has failed."""
    try:
        while ready := wait([connection, reader.doorbell], None if not answers else 0):
            if reader.doorbell in ready:
                number, prompt = reader.take()
                ask = reading.pop(number, None)
                if ask is not None:
                    _begin(connection, decoder, ask, prompt, answers)
            if connection not in ready:
                continue
            said = connection.recv()
            if not isinstance(said, Ask):
                reader.forget(said.number)
                reading.pop(said.number, None)
                if said.number in answers:
                    answers.pop(said.number).close()
            elif said.messages is not None or isinstance(said.prompt, str):
                reading[said.number] = said
                asked = Conversation(said.messages or (), said.variables)
                reader.read(said.number, said.prompt if isinstance(said.prompt, str) else asked)
            else:
                _begin(connection, decoder, said, said.prompt or (), answers)
    except EOFError:
        return False
    return True


def _begin(
    connection: Connection, decoder: Decoder, ask: Ask, prompt: Sequence[int] | FlywheelError,
    answers: dict[int, Answer],
) -> None:  # fmt: skip
    """Begin a request with the tokens `prompt`, or refuse it with the error that tokenising raised."""
    try:
        if isinstance(prompt, FlywheelError):
            raise prompt
        room = decoder.context - len(prompt) + 1
        answer = decoder.generate(
            prompt, max_tokens=room if ask.max_tokens is None else ask.max_tokens, sampling=ask.sampling,
            stop=ask.stop, ignore_end=ask.ignore_end, reuse=ask.reuse,
        )  # fmt: skip
    except FlywheelError as error:
        connection.send([_refused(ask.number, error, decoder.name)])
        return
    answer.begin()
    connection.send([Begun(ask.number, answer.prompt_tokens)])
    answers[ask.number] = answer


def _refused(number: int, error: FlywheelError, name: str) -> Refused:
    """The end of a request, without a file's path or the model's own `name`, which is often its directory's: clients
    know another one. A fault of the tokenizer's files is not the request's."""
    if isinstance(error, TokenizerError):
        return Refused(number, error.fault, usage=False)
    why = str(error).removeprefix(f"{name}: ")
    return Refused(number, why, isinstance(error, UsageError), isinstance(error, ContextError))


def _tell(said: list[Said], number: int, answer: Answer, name: str) -> bool:
    """Add an answer's new pieces to the messages `said`. Returns whether they were its last."""
    try:
        said += [AnswerPiece(number, piece) for piece in answer.ready()]
    except FlywheelError as error:
        said.append(_refused(number, error, name))
        return True
    if answer.finish is None:
        return False
    said.append(Ended(number, answer.finish, answer.prompt_read))
    return True
