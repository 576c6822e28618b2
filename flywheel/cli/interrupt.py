"""Ctrl-C ends a command: at once where Python runs, and within GRACE_S where it is in somebody else's code.

Python tells the main thread of a signal only between two of its own instructions, and does not end before all of its
threads have. A thread of this module hears of the signal at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from flywheel.cli.exits import ABORTED
from flywheel.process import hear_interrupts, ignore_interrupts

GRACE_S: Final = 1.2
"""How long an interrupted command may take to end by itself."""
FAREWELL_S: Final = 0.3
"""What putting the terminal right may take of such a command."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class _Guard:
    """What an interrupt means now."""

    __slots__ = ("aborted", "drains", "farewell")

    def __init__(self) -> None:
        self.drains = False
        self.aborted = False
        self.farewell: Callable[[], None] | None = None


_GUARD: Final = _Guard()


def watch_interrupts() -> None:
    """From now on, an interrupt that nothing drains ends this process. To be called in the main thread."""
    threading.Thread(target=_listen, args=(hear_interrupts(interrupt),), daemon=True).start()


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler: raises KeyboardInterrupt, and what that upsets on its way stays silent."""
    sys.unraisablehook = _say_nothing
    disable = getattr(sys.modules.get("logging"), "disable", None)  # the module may be half imported
    if disable is not None:
        disable()
    raise KeyboardInterrupt


def _say_nothing(_: object) -> None:
    """In place of a traceback of something that cannot be raised."""


@contextmanager
def draining(farewell: Callable[[], None]) -> Iterator[None]:
    """The first interrupt in here only asks for an end; the command goes on until it has one. `farewell` is called
    before a process that does not hear the second one is ended."""
    _GUARD.drains, _GUARD.farewell = True, farewell
    try:
        yield
    finally:
        _GUARD.drains, _GUARD.farewell = False, None


def abort() -> None:
    """The command was interrupted, and has said so."""
    _GUARD.aborted = True


def end_interrupted() -> None:
    """To be called last: this process ends with the code ABORTED, whatever else it still has to do and is told.

    At once where its command was aborted: nobody waits for its threads then, and Python ends by the signal where a
    module was being imported.
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
            if number not in _SIGNALS:
                continue
            if _GUARD.drains:
                _GUARD.drains = False
                continue
            time.sleep(GRACE_S)
            if _GUARD.farewell is not None:
                leaving = threading.Thread(target=_GUARD.farewell, daemon=True)
                leaving.start()
                leaving.join(FAREWELL_S)  # what it waits for may be held by the thread that does not hear
            if not _GUARD.aborted:
                os.write(2, b"flywheel: aborted\n")
            os._exit(ABORTED)
