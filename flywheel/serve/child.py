"""One decoding process as the server holds it: started, sent to, heard, and ended once it no longer answers."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Final

from flywheel.children import start_child
from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.worker import BEAT_S, Ask, Cancel, DecoderReady, MakeDecoder, Refused, Said, work

_START_S: Final = 1800.0
"""Seconds that a worker may take to load."""
_MISSED: Final = 60
"""Beats in a row, of BEAT_S seconds each, that a worker may miss. A stopped process misses them, a busy one does
not."""
_EXIT_S: Final = 5.0
"""Seconds that a worker may take to end after it was told to end or was killed."""


class GoneError(FlywheelError):
    """A decoding process could not be started, has died, or was killed since it did not answer."""


class Child:
    """A worker process, with a thread that sends to it. Raises GoneError if the system gives no process, thread or
    file descriptor."""

    def __init__(self, make: MakeDecoder) -> None:
        context = multiprocessing.get_context("spawn")
        self._letters: SimpleQueue[Ask | Cancel | None] = SimpleQueue()
        try:
            with ExitStack() as undo:
                self._connection, theirs = map(undo.enter_context, context.Pipe())
                self._pulse, beats = map(undo.enter_context, context.Pipe(duplex=False))
                self._process = context.Process(target=work, args=(theirs, beats, make), daemon=True)
                start_child(self._process.start)
                undo.callback(self._discard)
                threading.Thread(target=self._post, daemon=True).start()
                undo.pop_all()
        except (OSError, RuntimeError) as error:  # RuntimeError: of a thread
            why = getattr(error, "strerror", None) or error
            raise GoneError(f"the decoder's process cannot be started: {why}") from None
        theirs.close()
        beats.close()

    def load(self) -> DecoderReady:
        """Wait until the worker has loaded. Raises GoneError, and UsageError with its reason if it refuses."""
        end = time.monotonic() + _START_S
        while True:
            try:
                said = self._heard()
            except GoneError as gone:
                raise GoneError(f"{gone} while it started") from None
            if isinstance(said, DecoderReady):
                return said
            if isinstance(said, Refused):
                raise UsageError(said.why)
            if time.monotonic() > end:
                raise GoneError(self._killed(f"was not ready after {_START_S:g} s"))

    def send(self, message: Ask | Cancel) -> None:
        """Queue a message; does not wait."""
        self._letters.put(message)

    def hear(self) -> Sequence[Said]:
        """The next messages about requests; now and then none. Raises GoneError."""
        said = self._heard()
        return said if isinstance(said, list) else ()

    def end(self) -> None:
        """End the process and the thread."""
        self._letters.put(None)
        self._process.terminate()
        self._process.join(_EXIT_S)
        self._process.kill()
        self._process.join(_EXIT_S)

    def _discard(self) -> None:
        self._process.kill()
        self._process.join(_EXIT_S)
        with suppress(ValueError):  # it has not ended
            self._process.close()

    def _post(self) -> None:
        """Main function of the sending thread. A pipe that a busy worker does not read blocks only this thread. Where
        it fails, the process ends, since it would wait for requests for ever."""
        with ExitStack() as failing:
            failing.callback(self._process.kill)
            with suppress(OSError):  # of a process that has died, as who hears it notices
                while (letter := self._letters.get()) is not None:
                    self._connection.send(letter)
            failing.pop_all()

    def _heard(self) -> DecoderReady | Refused | list[Said] | None:
        """What the worker says next; None for a beat."""
        for _ in range(_MISSED):  # not in one wait: a server that was stopped itself has missed nothing
            ready = wait([self._connection, self._pulse], BEAT_S)
            try:
                if self._connection in ready:
                    said: DecoderReady | Refused | list[Said] = self._connection.recv()
                    return said
                if ready:
                    self._pulse.recv_bytes()
                    return None
            except (EOFError, OSError):
                raise GoneError(f"the decoder's process {self._death()}") from None
        raise GoneError(self._killed(f"did not answer for {_MISSED * BEAT_S:g} s"))

    def _killed(self, why: str) -> str:
        self._process.kill()
        self._process.join(_EXIT_S)
        return f"the decoder's process {why} and was killed"

    def _death(self) -> str:
        self._process.join(_EXIT_S)
        code = self._process.exitcode
        if code is None:
            return "does not answer"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
