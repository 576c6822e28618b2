"""Tokenises prompts outside the decoding thread, since a text of megabytes takes seconds."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Protocol, Self

from flywheel.errors import FlywheelError
from flywheel.models.tokenizer import no_tokenizer


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and further variables of the chat template."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] | None = None


Text = str | Conversation


class Encoder(Protocol):
    """The methods of a tokenizer that are used here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> list[int]:
        """Token ids of a conversation."""

    def close(self) -> None:
        """Free it."""


class PromptReader:
    """Tokenises texts in its own thread, in order. It closes the tokenizer when it ends.

    `doorbell` becomes readable once for each finished text, so that a thread can wait for it and other connections
    together.
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
        """Queue the text of a request; does not wait."""
        self._wanted.add(number)
        self._asked.put((number, text))

    def take(self) -> tuple[int, Sequence[int] | FlywheelError]:
        """The number of the oldest finished text, with its tokens or its error. Waits for one. Raises EOFError if the
        thread has failed."""
        self.doorbell.recv_bytes()
        number, made = self._made.get()
        self._wanted.discard(number)
        return number, made

    def forget(self, number: int) -> None:
        """Skip the text of a request that is still queued. If its turn has come already, its tokens come anyway."""
        self._wanted.discard(number)

    def _work(self) -> None:
        with self._button:  # readers waiting for a failed thread get the end of file
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
            raise no_tokenizer("prompt" if isinstance(text, str) else "messages")
        if isinstance(text, str):
            return self._tokenizer.encode(text)
        return self._tokenizer.chat(text.messages, text.variables)
