"""The server's side of the decoding process: sends requests to it, distributes its answers, and restarts it when it
dies."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Final

from flywheel.children import start_child
from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.worker import Ask, Begun, Cancel, Ended, Loaded, MakeDecoder, Part, Refused, work

_EXIT_S: Final = 5.0
"""Seconds that a worker may take to end after it was told to end or was killed."""


_PAUSES_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt to replace a worker that died."""


@dataclass(frozen=True, slots=True)
class Died:
    """The decoding process of a request has died."""

    why: str


Heard = Begun | Part | Ended | Refused | Died
Hear = Callable[[Heard], None]
"""Called in the engine's thread with each message about a request. Ended, Refused and Died are last messages."""


class FullError(FlywheelError):
    """The queue of requests is full."""


class Engine:
    """Runs one worker process that decodes as many requests together as it has rows. At most `most` requests wait or
    are being answered.

    When a worker dies, its requests fail and a new worker starts. If several attempts in a row fail, `failed` says why.
    """

    def __init__(self, make_decoder: MakeDecoder, most: int) -> None:
        self._make, self.most = make_decoder, most
        self._lock = threading.Lock()
        self._numbers = count()
        self._asked: dict[int, Hear] = {}
        self._connection: Connection | None = None  # None while no worker accepts requests
        self._process: SpawnProcess | None = None
        self._closing = threading.Event()
        self._letters: SimpleQueue[tuple[Connection, Ask | Cancel] | None] = SimpleQueue()
        self.restarts = self.context = 0
        self.failed: str | None = None

    def start(self) -> Loaded:
        """Start a worker. Raises UsageError with its reason if it cannot start."""
        loaded = self._spawn()
        threading.Thread(target=self._post, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()
        return loaded

    def close(self) -> None:
        """End the worker. Waiting requests fail with a message that the server is shutting down, and no new ones are
        accepted."""
        with self._lock:
            self._closing.set()
            process = self._process
        self._letters.put(None)
        if process is not None:  # its end ends the thread that listens to it
            process.terminate()
            process.join(_EXIT_S)
            process.kill()
            process.join(_EXIT_S)
        self._fail("the server is shutting down")

    @property
    def waiting(self) -> int:
        """Requests that wait or are being answered."""
        return len(self._asked)

    def ask(self, ask: Ask, hear: Hear) -> int:
        """Send a request to the worker and return its number; does not wait. Raises FullError, and FlywheelError if no
        worker runs."""
        with self._lock:
            if len(self._asked) >= self.most:
                raise FullError(f"{len(self._asked)} requests are under way, of at most {self.most}; try again later")
            if self._closing.is_set():
                raise FlywheelError("the server is shutting down")
            if self.failed is not None:
                raise FlywheelError(f"the decoding process failed to start: {self.failed}")
            if self._connection is None:
                raise FlywheelError("the decoder is starting again; try again later")
            number = next(self._numbers)
            self._asked[number] = hear
            self._letters.put((self._connection, replace(ask, number=number)))
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request. `hear` gets no more messages about it."""
        with self._lock:
            wanted = self._asked.pop(number, None)
            if wanted is not None and self._connection is not None:
                self._letters.put((self._connection, Cancel(number)))

    def _post(self) -> None:
        """Main function of the sending thread. A pipe that a busy worker does not read blocks only this thread."""
        while (letter := self._letters.get()) is not None:
            connection, message = letter
            with suppress(OSError):  # the listener notices the death and reports it
                connection.send(message)

    def _spawn(self) -> Loaded:
        """Start a worker and wait until it has loaded. Raises UsageError if it fails."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self._make), daemon=True)
        start_child(process.start)
        theirs.close()
        with self._lock:
            self._process = process
            if self._closing.is_set():  # `close` has not seen it
                process.terminate()
        try:
            said = ours.recv()
        except (EOFError, OSError):
            ours.close()
            raise UsageError(f"the decoder's process {self._death()} while it started") from None
        if isinstance(said, Refused):
            ours.close()
            raise UsageError(said.why)
        assert isinstance(said, Loaded)
        with self._lock:
            self._connection, self.context = ours, said.context
        return said

    def _listen(self) -> None:
        """Main function of the engine's thread. It ends when the engine is closed, or when no worker starts."""
        while not self._closing.is_set():
            assert self._connection is not None
            try:
                for said in self._connection.recv():
                    self._tell(said)
            except (EOFError, OSError):
                with self._lock:
                    self._connection = None
                if self._closing.is_set():
                    return
                self._fail(f"the decoder's process {self._death()}; the next request is answered by another one")
                self.restarts += 1
                if not self._again():
                    return

    def _again(self) -> bool:
        """Replace a worker that died; False if none starts."""
        why = ""
        for pause in _PAUSES_S:
            if self._closing.wait(pause):
                return False
            try:
                self._spawn()
            except UsageError as error:
                why = str(error)
            else:
                return True
        self.failed = why
        return False

    def _tell(self, said: Begun | Part | Ended | Refused) -> None:
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

    def _death(self) -> str:
        assert self._process is not None
        self._process.join(_EXIT_S)
        code = self._process.exitcode
        if code is None:
            return "does not answer"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
