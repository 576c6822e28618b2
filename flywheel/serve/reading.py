"""Makes token ids of requests' texts beside the thread that decodes: a text of megabytes takes seconds."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Protocol, Self

from flywheel.errors import FlywheelError, UsageError

Text = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a conversation."""


class Encoder(Protocol):
    """What a tokenizer does here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation."""

    def close(self) -> None:
        """End it."""


class PromptReader:
    """Makes tokens of texts in a thread of its own, in the order of the texts. It closes the tokenizer at its end.

    `doorbell` can be read once for each text that is done, so that a thread can wait for it and for others at once.
    """

    def __init__(self, tokenizer: Encoder | None) -> None:
        self._tokenizer = tokenizer
        self._asked: SimpleQueue[tuple[int, Text] | None] = SimpleQueue()
        self._made: SimpleQueue[tuple[int, Sequence[int] | FlywheelError]] = SimpleQueue()
        self._wanted: set[int] = set()
        doorbell, self._button = Pipe(duplex=False)
        self.doorbell: Final[Connection] = doorbell
        threading.Thread(target=self._work, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asked.put(None)

    def read(self, number: int, text: Text) -> None:
        """Hand in the text of a request by its number; does not wait."""
        self._wanted.add(number)
        self._asked.put((number, text))

    def take(self) -> tuple[int, Sequence[int] | FlywheelError]:
        """The number of the oldest text that is done, with its tokens or what went wrong. Waits for one.
        Raises EOFError where the thread has failed."""
        self.doorbell.recv_bytes()
        number, made = self._made.get()
        self._wanted.discard(number)
        return number, made

    def forget(self, number: int) -> None:
        """Skip the text of a request where its turn has not come. Its tokens may come all the same."""
        self._wanted.discard(number)

    def _work(self) -> None:
        with self._button:  # who waits for a thread that has failed reads the end
            while (asked := self._asked.get()) is not None:
                number, text = asked
                if number not in self._wanted:
                    continue
                try:
                    made: Sequence[int] | FlywheelError = self._tokens(text)
                except FlywheelError as error:
                    made = error
                self._made.put((number, made))
                self._button.send_bytes(b".")
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _tokens(self, text: Text) -> Sequence[int]:
        if self._tokenizer is None:
            raise UsageError("prompt: the model has no tokenizer; give token ids")
        return self._tokenizer.encode(text) if isinstance(text, str) else self._tokenizer.chat(text)
