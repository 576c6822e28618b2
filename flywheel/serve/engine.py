"""The server's side of the decoding process: sends requests to it, distributes its answers, and restarts it when it
dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from flywheel.errors import FlywheelError
from flywheel.serve.child import Child, GoneError
from flywheel.serve.worker import AnswerPiece, Ask, Begun, Cancel, DecoderReady, Ended, MakeDecoder, Refused

_PAUSES_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 60.0, 60.0)
"""Seconds before each attempt to replace a worker that died: five minutes, in which a machine may get free processes,
descriptors or memory."""
_UNTOLD: Final = "it cannot load the model; the server's stderr says why"
"""What clients are told of a worker that refuses to start, since its reason may name directories."""


@dataclass(frozen=True, slots=True)
class Died:
    """The decoding process of a request has died, or was ended."""

    why: str


Heard = Begun | AnswerPiece | Ended | Refused | Died
Hear = Callable[[Heard], None]
"""Called in the engine's thread with each message about a request. Ended, Refused and Died are last messages."""


class FullError(FlywheelError):
    """The queue of requests is full."""


class Engine:
    """Runs one worker process that decodes as many requests together as it has rows. At most `most` requests wait or
    are being answered.

    When a worker dies or does not answer, its requests fail and a new worker starts. If several attempts in a row fail,
    `failed` says why, and the engine stays without a worker. `say` gets a line about each of these events.
    """

    def __init__(self, make_decoder: MakeDecoder, most: int, say: Callable[[str], None] = lambda _: None) -> None:
        self._make, self.most, self._say = make_decoder, most, say
        self._lock = threading.Lock()
        self._numbers = count()
        self._asked: dict[int, Hear] = {}
        self._child: Child | None = None  # it may be loading
        self._ready = False
        self._closing = threading.Event()
        self._why = ""  # the last attempt to start a worker failed
        self._told = ""  # what clients are told of `failed`
        self.restarts = self.context = 0
        self.failed: str | None = None

    def start(self) -> DecoderReady:
        """Start a worker. Raises GoneError, and UsageError with its reason if it refuses to start."""
        loaded = self._spawn()
        threading.Thread(target=self._supervise, daemon=True).start()
        return loaded

    def close(self) -> None:
        """End the worker. Waiting requests fail with a message that the server is shutting down, and no new ones are
        accepted."""
        with self._lock:
            self._closing.set()
            child = self._child
        if child is not None:  # its end ends the thread that listens to it
            child.end()
        self._fail("the server is shutting down")

    @property
    def waiting(self) -> int:
        """Requests that wait or are being answered."""
        return len(self._asked)

    @property
    def unable(self) -> str | None:
        """Why any request would fail now; None if it would be queued, or refused by its own fault or FullError."""
        if self._closing.is_set():
            return "the server is shutting down"
        if self.failed is not None:
            return f"no decoding process runs any more: {self._told}"
        if not self._ready:
            return f"the decoder is starting again{self._why}; try again later"
        return None

    def ask(self, ask: Ask, hear: Hear) -> int:
        """Send a request to the worker and return its number; does not wait. Raises FullError, and FlywheelError if no
        worker runs."""
        with self._lock:
            if self.unable is not None:
                raise FlywheelError(self.unable)
            if len(self._asked) >= self.most:
                raise FullError(f"{len(self._asked)} requests are under way, of at most {self.most}; try again later")
            assert self._child is not None
            number = next(self._numbers)
            self._asked[number] = hear
            self._child.send(replace(ask, number=number))
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request. `hear` gets no more messages about it."""
        with self._lock:
            wanted = self._asked.pop(number, None)
            if wanted is not None and self._ready and self._child is not None:
                self._child.send(Cancel(number))

    def _spawn(self) -> DecoderReady:
        """Start a worker and wait until it has loaded. Raises as `start`."""
        child = Child(self._make)
        with self._lock:
            self._child = child
            closing = self._closing.is_set()
        try:
            if closing:  # `close` has not seen it
                child.end()
            loaded = child.load()
        except FlywheelError:
            child.end()
            raise
        with self._lock:
            self._ready, self.context, self._why = True, loaded.context, ""
        return loaded

    def _supervise(self) -> None:
        """Main function of the engine's thread. It ends when the engine is closed or has failed."""
        try:
            self._listen()
        except BaseException as error:
            why = f"{type(error).__name__} in the server's own thread"
            self._give_up(why, why)
            raise

    def _listen(self) -> None:
        """Distribute what workers say until the engine is closed, or no worker starts any more."""
        while not self._closing.is_set():
            assert self._child is not None
            try:
                heard = self._child.hear()
            except GoneError as gone:
                with self._lock:
                    self._ready = False
                if self._closing.is_set():
                    return
                self._child.end()
                self._say(f"{gone}; starting another one")
                self._fail(f"{gone}; the next request is answered by another one")
                self.restarts += 1
                if not self._again():
                    return
            else:
                for said in heard:
                    self._tell(said)

    def _again(self) -> bool:
        """Replace a worker that died; False if none starts."""
        why = told = ""
        for attempt, pause in enumerate(_PAUSES_S, start=1):
            if self._closing.wait(pause):
                return False
            try:
                self._spawn()
            except FlywheelError as error:
                if self._closing.is_set():
                    return False
                why = str(error)
                told = why if isinstance(error, GoneError) else _UNTOLD
                self._why = f" (attempt {attempt} of {len(_PAUSES_S)}: {told})"
                self._say(f"attempt {attempt} of {len(_PAUSES_S)} to start a decoding process: {why}")
            else:
                self._say("another decoding process is ready")
                return True
        self._give_up(why, told)
        return False

    def _give_up(self, why: str, told: str) -> None:
        with self._lock:
            self._ready, self.failed, self._told = False, why, told
        self._fail(f"no decoding process runs any more: {told}")

    def _tell(self, said: Begun | AnswerPiece | Ended | Refused) -> None:
        assert said.number is not None
        with self._lock:
            last = isinstance(said, Ended | Refused)
            hear = self._asked.pop(said.number, None) if last else self._asked.get(said.number)
        if hear is not None:
            hear(said)

    def _fail(self, why: str) -> None:
        with self._lock:
            asked, self._asked = self._asked, {}
        for hear in asked.values():
            hear(Died(why))
