"""Starts every process that ends with this one, however this one ends and whatever that one executes.

The kernel kills a child when the *thread* that started it ends (see `lifetime`), so one thread that stays starts all.
A pipe tells a child, too, and the group of a foreign program, of which the kernel would kill the first process only.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import IO, Any, Final, TypeVar

from flywheel import lifetime
from flywheel.process import abandon_threads, sheltered

_T = TypeVar("_T")

_STARTERS: Final[dict[int, ThreadPoolExecutor]] = {}
"""The thread that starts children, by process: a fork has no threads of its parent."""
_MAKING: Final = threading.Lock()


def start_child(start: Callable[[], _T]) -> _T:
    """The result of `start`, which starts a process, `sheltered`, in the thread that lasts as long as this process.

    The child calls `process.enter_child` (of multiprocessing) or `lifetime.die_with_parent` first. Raises as `start`.
    """
    with _MAKING:
        starter = _STARTERS.setdefault(os.getpid(), ThreadPoolExecutor(1, "flywheel-starter"))
    return starter.submit(_sheltered, start).result()


def _sheltered(start: Callable[[], _T]) -> _T:
    with sheltered():
        return start()


def start_fork_server(modules: Sequence[str]) -> None:
    """Start the process of multiprocessing's "forkserver", which imports `modules` and then forks others.

    Returns at once, and does nothing where the process exists already, with whatever modules.
    """
    multiprocessing.set_forkserver_preload(list(modules))
    start_child(forkserver.ensure_running)


def fork_server_pid() -> int:
    """The process id of that server."""
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # no public name
    return pid


def end_process(process: BaseProcess, wait_s: float) -> None:
    """Wait for a process of multiprocessing, and kill it after `wait_s`.

    One that waits for a device or a file system cannot be killed. So that this process's end does not wait for it, too,
    it is to end by `os._exit`.
    """
    process.join(wait_s)
    process.kill()
    process.join(wait_s)
    if process.is_alive():
        abandon_threads()


def start_program(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = subprocess.DEVNULL,
    stderr: int | IO[Any] | None = subprocess.DEVNULL,
    text: bool = False,
) -> subprocess.Popen[Any]:
    """Start a program as the leader of a process group, which Ctrl-C does not reach.

    All processes of the group are killed when this process ends, or when nobody has the result any more.
    """
    reading, writing = os.pipe()
    guarded = [sys.executable, "-I", "-S", lifetime.__file__, str(os.getpid()), str(reading), *words]

    def start() -> subprocess.Popen[Any]:
        return subprocess.Popen(
            guarded, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=text, process_group=0,
            pass_fds=[reading],
        )  # fmt: skip

    try:
        program = start_child(start)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    weakref.finalize(program, os.close, writing)
    return program
