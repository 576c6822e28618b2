"""Watches a process that somebody waits for: says what is waited for, and kills it when its time is up.

A process may be stopped (SIGSTOP), or hang in a driver or a file system. Its end ends every read and write on its
connections, so a caller that is blocked in one goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil, inf
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any, Final

from flywheel.errors import WorkerDiedError

_TICK_S: Final = 0.25
_SOON_S: Final = 1.0
"""Most answers come within it, without a watch."""
_EXIT_S: Final = 5.0
_AGAIN: Final = 3
"""Each line comes after so many times as long as the one before."""
_STATES: Final = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a device or a file system"}
"""States of a process in which it executes nothing. Source: proc_pid_stat(5)."""
_STOPPED: Final = (_STATES["T"], _STATES["t"])


@dataclass(frozen=True, slots=True)
class Patience:
    """Wall seconds: `say_s` until a line says what is waited for, `stopped_s` that a process may be stopped."""

    say_s: float = 5.0
    stopped_s: float = 30.0


PATIENCE: Final = Patience()


class Watch:
    """What is known of a process that somebody waits for. `killed` says why it was killed, if it was."""

    def __init__(self, what: str, pid: int, patience: Patience) -> None:
        self._what, self._pid, self._patience = what, pid, patience
        self._changed = threading.Condition()
        self._over = False
        self.killed: str | None = None
        self.late = False  # whether the limit was the reason
        self.enter("", inf)

    def enter(self, doing: str, limit_s: float, quiet_s: float = 0.0) -> None:
        """The process now does something else, for which it has `limit_s`. It is usual that this takes `quiet_s`: no
        line says so before, unless the process is stopped."""
        with self._changed:
            self.doing, self._limit_s = doing, limit_s
            self._waited_s = self._stopped_s = 0.0
            self._next_s = max(quiet_s, self._patience.say_s)
            self._said: str | None = None

    def end(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def run(self) -> None:
        """Watch until the end, or kill the process.

        Only time in which this process runs counts: somebody may have stopped both.
        """
        last = monotonic()
        with self._changed:
            while not self._changed.wait_for(lambda: self._over, _TICK_S):
                now = monotonic()
                passed, last = min(now - last, 2 * _TICK_S), now
                state = _STATES.get(state_of(self._pid))
                self._waited_s += passed
                self._stopped_s = self._stopped_s + passed if state else 0.0
                if self._stopped_s >= self._patience.stopped_s and state in _STOPPED:
                    self._kill(f"{state} for {self._patience.stopped_s:g} s")
                    return
                if self._waited_s >= self._limit_s:
                    self.late = True
                    self._kill(f"gave no answer within {ceil(self._limit_s)} s")
                    return
                self._speak(state)

    def _speak(self, state: str | None) -> None:
        waited_s = self._waited_s
        news = state != self._said and self._stopped_s >= self._patience.say_s
        if waited_s < self._next_s and not news:
            return
        self._next_s, self._said = max(self._next_s, _AGAIN * waited_s), state
        how = f"{state}, and has not answered" if state else "has not answered"
        left = min(self._limit_s, self._patience.stopped_s if state in _STOPPED else inf)
        limit = "" if left == inf else f"; it has {ceil(left)} s"
        tell(f"{self._what} (process {self._pid}) {how} for {waited_s:.0f} s{self.doing}{limit}")

    def _kill(self, why: str) -> None:
        self.killed = why
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


@contextmanager
def watched(
    what: str, pid: int, doing: str, limit_s: float, patience: Patience, quiet_s: float = 0.0
) -> Iterator[Watch]:
    """Watch process `pid`, which `what` names, while the block waits for it. As `Watch.enter`."""
    watch = Watch(what, pid, patience)
    watch.enter(doing, limit_s, quiet_s)
    threading.Thread(target=watch.run, daemon=True).start()
    try:
        yield watch
    finally:
        watch.end()


def answer_of(
    what: str, process: BaseProcess, lane: Connection, doing: str, limit_s: float, patience: Patience, quiet_s: float
) -> Any:
    """The next message of a process. Raises WorkerDiedError where it dies, or is killed."""
    assert process.pid is not None
    watch = None
    with suppress(EOFError, OSError):  # it is dead; its last message may be cut off
        if not lane.poll(min(_SOON_S, patience.say_s)):
            with watched(what, process.pid, doing, limit_s, patience, quiet_s) as watch:
                lane.poll(None)
        return lane.recv()
    process.join(_EXIT_S)
    if watch is not None and watch.killed:
        raise WorkerDiedError(f"{what}: {watch.killed}{doing}, and was killed")
    raise WorkerDiedError(f"{what}: died with exit code {process.exitcode}")


def state_of(pid: int) -> str:
    """The letter of a process's state; empty where the system does not tell. Source: proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def tell(line: str) -> None:
    """Write a line to stderr, where the user of this process's owner reads it, too."""
    with suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
        sys.stderr.write(f"flywheel: {line}\n")
        sys.stderr.flush()
