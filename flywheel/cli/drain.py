"""Interrupt a search: the first signal asks it to finish the running trials, the second aborts it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Final, Self

from flywheel.cli.interrupt import draining, interrupt
from flywheel.process import handling

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


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
