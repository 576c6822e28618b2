"""How a process that we spawn lives and dies: Ctrl-C is its parent's business, and it does not outlive its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sheltered() -> Iterator[None]:
    """Processes that start in here inherit a blocked SIGINT, so that Ctrl-C cannot kill them before they ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def enter_child() -> None:
    """To be called first in a spawned process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C drains: the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A parent that was killed leaves no process behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
