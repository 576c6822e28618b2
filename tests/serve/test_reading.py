"""Texts become tokens beside the thread that decodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from patience import HANG_S

from flywheel.errors import UsageError
from flywheel.runtime.sequences import GREEDY
from flywheel.serve.decoder import Decoder
from flywheel.serve.reading import Conversation, PromptReader
from flywheel.serve.worker import AnswerPiece, Ask, Begun, Cancel, Ended, Refused, answer_all

LIMIT_S = 120.0
"""What hangs."""


class SlowEncoder:
    """Has no answer to a text of one letter before it is told to."""

    def __init__(self) -> None:
        self.goes_on, self.closed = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        if text == "x":
            assert self.goes_on.wait(LIMIT_S)
            raise UsageError("prompt: too long")
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> list[int]:
        return self.encode(messages[0]["content"])

    def close(self) -> None:
        self.closed.set()


class Listener:
    """The other end of a worker."""

    def __init__(self, connection: Connection) -> None:
        self.send = connection.send
        self._connection = connection
        self._heard: list[Any] = []

    def hear(self) -> Any:
        """The next thing that is said."""
        while not self._heard:
            assert self._connection.poll(LIMIT_S)
            self._heard += self._connection.recv()
        return self._heard.pop(0)

    def hear_to_the_end(self, number: int) -> list[Any]:
        """What is said up to the end of a request."""
        heard = [self.hear()]
        while not isinstance(heard[-1], Ended) or heard[-1].number != number:
            heard.append(self.hear())
        return heard


@contextmanager
def answering(checkpoint: Path, encoder: SlowEncoder) -> Iterator[Listener]:
    """A worker in a thread."""
    ours, theirs = Pipe()

    def work() -> None:
        with Decoder.load(str(checkpoint), device="reference", context=64) as decoder, PromptReader(encoder) as reader:
            answer_all(theirs, decoder, reader)
        theirs.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield Listener(ours)
    finally:
        ours.close()
        encoder.goes_on.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def ask(number: int, prompt: str | tuple[int, ...]) -> Ask:
    return Ask(number, prompt, None, 12, GREEDY, (), True)


def test_a_text_that_is_being_tokenised_holds_no_answer_up(checkpoint: Path) -> None:
    encoder = SlowEncoder()
    with answering(checkpoint, encoder) as worker:
        worker.send(ask(0, "x"))
        worker.send(ask(1, (1, 2, 3)))
        heard = worker.hear_to_the_end(1)  # while the text of the first is not read
        assert not encoder.goes_on.is_set()
        assert heard[0] == Begun(1, 3)
        assert sum(isinstance(each, AnswerPiece) and each.piece.token_id is not None for each in heard) == 12
        encoder.goes_on.set()
        assert worker.hear() == Refused(0, "prompt: too long", True)
    assert encoder.closed.wait(LIMIT_S)


def test_a_request_that_is_cancelled_while_its_text_is_read_is_not_answered(checkpoint: Path) -> None:
    encoder = SlowEncoder()
    with answering(checkpoint, encoder) as worker:
        worker.send(ask(0, "x"))
        worker.send(ask(1, "later"))
        worker.send(Cancel(0))
        worker.send(ask(2, (1,)))
        assert worker.hear_to_the_end(2)[0] == Begun(2, 1)
        encoder.goes_on.set()
        assert {each.number for each in worker.hear_to_the_end(1)} == {1}


def test_texts_are_read_in_their_order_and_errors_are_values() -> None:
    encoder = SlowEncoder()
    encoder.goes_on.set()
    with PromptReader(encoder) as reader:
        reader.read(0, "ab")
        reader.read(1, "x")
        reader.read(2, Conversation([{"role": "user", "content": "c"}]))
        made = [reader.take() for _ in range(3)]
    assert [number for number, _ in made] == [0, 1, 2]
    assert (made[0][1], made[2][1]) == ([97, 98], [99])
    assert isinstance(made[1][1], UsageError)


def test_a_text_that_nobody_wants_any_more_keeps_no_other_waiting() -> None:
    encoder = SlowEncoder()
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return SlowEncoder.encode(encoder, text)

    encoder.encode = encode  # type: ignore[method-assign]
    with PromptReader(encoder) as reader:
        for number, text in enumerate(("x", "left", "stays")):
            reader.read(number, text)
        reader.forget(1)
        encoder.goes_on.set()
        assert [reader.take()[0] for _ in range(2)] == [0, 2]
    assert seen == ["x", "stays"]


def test_a_reader_that_fails_ends_the_worker_and_leaves_nobody_waiting(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(SlowEncoder):
        def encode(self, text: str) -> list[int]:
            raise OSError("no process can be started")

    died: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr("threading.excepthook", lambda what: died.put(str(what.exc_value)))
    with answering(checkpoint, Failing()) as worker, pytest.raises(EOFError):
        worker.send(ask(0, "x"))
        worker.hear()
    assert died.get(timeout=HANG_S) == "no process can be started"


def test_a_text_without_a_tokenizer_is_refused() -> None:
    with PromptReader(None) as reader:
        reader.read(5, "a")
        number, made = reader.take()
    assert number == 5
    assert isinstance(made, UsageError)
    with pytest.raises(UsageError, match="give token ids"):
        raise made
