"""Make Ctrl-C end a command: at once while Python code runs, and within GRACE_S while foreign code runs.

Python runs a signal handler only between two instructions of the main thread, and exits only once all its threads have
ended. So this module's thread hears of signals itself, and at once. In a search, the first signal asks it to finish
the running trials, and the second aborts it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

from flywheel.cli.exits import ABORTED
from flywheel.process import handling, hear_interrupts, ignore_interrupts

GRACE_S: Final = 1.2
"""Wall seconds that an interrupted command has to end by itself."""
FAREWELL_S: Final = 0.3
"""Wall seconds that restoring the terminal may take after that."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class _InterruptState:
    """What an interrupt does at present."""

    __slots__ = ("aborted", "drains", "farewell", "raised")

    def __init__(self) -> None:
        self.drains = False
        self.raised = False
        self.aborted = False
        self.farewell: Callable[[], None] | None = None


_GUARD: Final = _InterruptState()


def watch_interrupts() -> None:
    """From now on, an interrupt ends this process, unless a `draining` block takes it. Call this in the main thread."""
    threading.Thread(target=_listen, args=(hear_interrupts(interrupt),), daemon=True).start()


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler: raises KeyboardInterrupt, and silences the errors that it causes elsewhere.

    While a module is being imported it ends the process instead: C++ code that imports modules, such as torch's, calls
    std::terminate when an import raises.
    """
    if _importing(frame):
        _end()
    sys.unraisablehook = _say_nothing
    disable = getattr(sys.modules.get("logging"), "disable", None)  # logging may be half imported
    if disable is not None:
        disable()
    _GUARD.raised = True
    raise KeyboardInterrupt


@contextmanager
def interrupts_first() -> Iterator[None]:
    """An error that leaves the block after an interrupt in it leaves as KeyboardInterrupt, which foreign code may have
    turned into that error."""
    _GUARD.raised = False
    try:
        yield
    except Exception as error:
        if not _GUARD.raised:
            raise
        raise KeyboardInterrupt from error


def _importing(frame: FrameType | None) -> bool:
    """Whether the frame runs within an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _end() -> NoReturn:
    """End this process at once."""
    if not _GUARD.aborted:
        os.write(2, b"flywheel: aborted\n")
    os._exit(ABORTED)


def _say_nothing(_: object) -> None:
    """Stands in place of the hook that prints errors which cannot be raised."""


@contextmanager
def draining(farewell: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first interrupt only asks the command to end; the command drains.

    If the process does not react to the second interrupt, `farewell` is called before the process is ended.
    """
    _GUARD.drains, _GUARD.farewell = True, farewell
    try:
        yield
    finally:
        _GUARD.drains, _GUARD.farewell = False, None


def abort() -> None:
    """Note that the command was interrupted and has said so."""
    _GUARD.aborted = True


def end_interrupted() -> None:
    """End this process with the code ABORTED, whatever work or signals are left. Call this last.

    After `abort` the process ends at once. Nobody waits for its threads, and Python would end by the signal, without
    the code, if a module was being imported.
    """
    if _GUARD.aborted:
        os._exit(ABORTED)
    ignore_interrupts()
    threading.Thread(target=_expire, daemon=True).start()


def _expire() -> None:
    time.sleep(GRACE_S)
    os._exit(ABORTED)


def _listen(reading: int) -> None:
    while True:
        for number in os.read(reading, 64):
            if number not in SIGNALS:
                continue
            if _GUARD.drains:
                _GUARD.drains = False
                continue
            time.sleep(GRACE_S)
            if _GUARD.farewell is not None:
                leaving = threading.Thread(target=_GUARD.farewell, daemon=True)
                leaving.start()
                leaving.join(FAREWELL_S)  # the thread that does not react may hold a lock that it waits for
            _end()


class Drain:
    """Within the block, SIGINT or SIGTERM sets `requested` and calls `notice`. A second one calls `abort` and raises
    KeyboardInterrupt.

    `notice` runs inside a signal handler, so it must not print through buffered streams. `abort` restores the terminal.
    Another thread calls it where the main thread does not run Python code.
    """

    def __init__(self, notice: Callable[[], None], abort: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._notice = notice
        self._abort = abort
        self._blocks = ExitStack()

    def __enter__(self) -> Self:
        self._blocks.enter_context(draining(self._abort))
        self._blocks.enter_context(handling(SIGNALS, self._handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._abort()
            interrupt(number, frame)
        self.requested = True
        self._notice()
