"""Ends a process with its parent, and a program with all of its processes with the one that started it.

Also a script of its own, which `children.start_program` runs, so it imports nothing but Python's library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # Source: linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends and whatever this process executes.

    "Parent" is the thread that started this process: start it by `children.start_child`, whose thread stays. If process
    `parent_pid` is no longer the parent, end at once. Elsewhere than on Linux, do nothing.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    set_death_signal()
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(1)


def set_death_signal() -> None:
    """As `die_with_parent`, for a parent whose number is not known."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(owner_pid: int, pipe: int, words: list[str]) -> None:
    """Become the program `words`, the leader of a process group that is killed when `pipe`'s other end closes."""
    os.set_inheritable(pipe, False)
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)  # so that the guard is no child of the program, which may wait for its children
        _guard(pipe)
    os.waitpid(between, 0)
    die_with_parent(owner_pid)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        os._exit(127)


def _guard(pipe: int) -> None:
    """Wait for the owner's end, then kill this process group. It holds none of the program's streams open."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
