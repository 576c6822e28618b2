"""The living end of the decoding process: hands it requests, hands out what it says, replaces it when it dies."""

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
from typing import Final

from flywheel.errors import FlywheelError, UsageError
from flywheel.process import sheltered
from flywheel.serve.worker import Ask, Begun, Cancel, Ended, Loaded, MakeDecoder, Part, Refused, work

_EXIT_S: Final = 5.0
"""What a worker that was told to end, or killed, may take."""


@dataclass(frozen=True, slots=True)
class Died:
    """The process that was answering has died."""

    why: str


Heard = Begun | Part | Ended | Refused | Died
Hear = Callable[[Heard], None]
"""Called from the engine's thread with what becomes of a request; Ended, Refused and Died are the last."""


class FullError(FlywheelError):
    """So many requests wait that no other one is taken."""


class Engine:
    """One worker, which answers one request after the other; at most `most` wait or are being answered.

    `start` waits for the first worker and raises what it could not start for. A worker that dies fails the requests
    that it had begun or been given, and another one takes its place.
    """

    def __init__(self, make_decoder: MakeDecoder, most: int) -> None:
        self._make, self._most = make_decoder, most
        self._lock = threading.Lock()
        self._numbers = count()
        self._asked: dict[int, Hear] = {}
        self._connection: Connection | None = None
        self._process: SpawnProcess | None = None
        self._closing = False
        self.loaded: Loaded | None = None
        self.restarts = 0

    def start(self) -> Loaded:
        """Begin. Raises UsageError with the worker's reason where it cannot."""
        self._spawn()
        self.loaded = self._greeting()
        threading.Thread(target=self._listen, daemon=True).start()
        return self.loaded

    def close(self) -> None:
        """End the worker; requests that wait are told that it died."""
        self._closing = True
        process, connection = self._process, self._connection
        if connection is not None:
            connection.close()
        if process is not None:
            process.terminate()
            process.join(_EXIT_S)
            process.kill()
            process.join(_EXIT_S)
        self._fail("the server ends")

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return None if self._process is None else self._process.pid

    @property
    def waiting(self) -> int:
        """Requests that wait or are being answered."""
        return len(self._asked)

    def ask(self, ask: Ask, hear: Hear) -> int:
        """Hand a request in, whose number is set here and returned. Raises FullError, and FlywheelError where no worker
        lives."""
        with self._lock:
            if len(self._asked) >= self._most:
                raise FullError(f"{len(self._asked)} requests are under way, of at most {self._most}; try again later")
            if self._connection is None:
                raise FlywheelError("the decoder is starting again; try again later")
            number = next(self._numbers)
            self._asked[number] = hear
            connection = self._connection
        with suppress(OSError):  # the listener notices the death, and tells
            connection.send(replace(ask, number=number))
        return number

    def cancel(self, number: int) -> None:
        """Nobody wants a request any more; it is not heard of again."""
        with self._lock:
            wanted = self._asked.pop(number, None)
            connection = self._connection
        if wanted is not None and connection is not None:
            with suppress(OSError):
                connection.send(Cancel(number))

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self._make), daemon=True)
        with sheltered():
            process.start()
        theirs.close()
        self._process, self._connection = process, ours

    def _greeting(self) -> Loaded:
        assert self._connection is not None
        try:
            said = self._connection.recv()
        except EOFError:
            raise UsageError(f"the decoder's process {self._death()} while it started") from None
        if isinstance(said, Refused):
            raise UsageError(said.why)
        assert isinstance(said, Loaded)
        return said

    def _listen(self) -> None:
        """The engine's thread: until the engine is closed."""
        while not self._closing:
            assert self._connection is not None
            try:
                self._tell(self._connection.recv())
            except (EOFError, OSError):
                if self._closing or not self._again():
                    return

    def _tell(self, said: Begun | Part | Ended | Refused) -> None:
        assert said.number is not None
        with self._lock:
            last = isinstance(said, Ended | Refused)
            hear = self._asked.pop(said.number, None) if last else self._asked.get(said.number)
        if hear is not None:
            hear(said)

    def _again(self) -> bool:
        """Another worker in the place of one that died; False where none starts."""
        with self._lock:
            self._connection = None
        self._fail(f"the decoder's process {self._death()}; the next request is answered by another one")
        self.restarts += 1
        try:
            self._spawn()
            self.loaded = self._greeting()
        except FlywheelError:
            with self._lock:
                self._connection = None
            return False
        return True

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
