"""Interrupting a search: the first signal asks it to finish what runs, the second aborts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Self

from flywheel.process import handling

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Drain:
    """While entered, SIGINT and SIGTERM set `requested` and call `notice`; a second one raises KeyboardInterrupt.

    `notice` runs inside a signal handler: it must not print through buffered streams.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        self.requested = False
        self._notice = notice
        self._handling = handling(SIGNALS, self._handle)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handling.__exit__(kind, error, trace)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._notice()
