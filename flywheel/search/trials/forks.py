"""Processes that start with everything imported and compiled: forks of a server process that loaded it once.

A process needs 0.8 s for its imports and numba's cached code, which is most of a small model's search. Forks of the
coordinator itself would inherit its threads' locks.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

from flywheel.children import fork_server_pid, start_child, start_fork_server
from flywheel.errors import WorkerDiedError
from flywheel.process import enter_child, set_environment, usable_cores
from flywheel.vm.watching import PATIENCE, Patience, watched

_NURSERY: Final = ("flywheel.search.trials.nursery",)


_FORK_S: Final = 960.0
"""Most wall seconds until the server process forks. Its first start compiles, on a busy machine for minutes."""
_QUIET_S: Final = 60.0
"""Wall seconds until a line says so: a first start is announced anyway."""
_FORKING: Final = threading.Lock()

MOST_JOBS: Final = 16
"""Most processes that predict unless `jobs` says otherwise: a sampler asks for few predictions at once."""


def jobs_of(jobs: int | None) -> int:
    """How many processes predict on this machine: `jobs`; for None, one a usable core and MOST_JOBS at most."""
    return min(usable_cores(), MOST_JOBS) if jobs is None else jobs


def expect_forks() -> None:
    """Start the server process now, in the background, so that later forks need not wait for it."""
    start_fork_server(_NURSERY)


def fork(
    name: str, serve: Callable[..., None], lanes: int, *arguments: Any, patience: Patience = PATIENCE
) -> tuple[ForkServerProcess, list[Connection]]:
    """Fork a process that runs `serve(its ends of the lanes, *arguments)`; return it and our ends of the `lanes`.

    The process has this process's environment, and ends with this process. It is no daemon, so it may have children.
    Raises WorkerDiedError where it does not start.
    """
    expect_forks()
    context = multiprocessing.get_context("forkserver")
    pairs = [context.Pipe() for _ in range(lanes)]
    theirs = [their for _, their in pairs]
    process = context.Process(target=_begin, args=(dict(os.environ), serve, theirs, arguments), name="flywheel-fork")
    server = "the process that forks others"
    watching = watched(server, fork_server_pid(), " while it imports and compiles", _FORK_S, patience, _QUIET_S)
    try:
        with _FORKING, watching as watch:  # one after the other, so that one of those who wait says so
            start_child(process.start)
    except (EOFError, OSError) as error:
        if watch.killed:
            raise WorkerDiedError(f"{name}: {server} {watch.killed}, and was killed") from error
        raise WorkerDiedError(f"{name}: no process starts: {str(error) or type(error).__name__}") from error
    finally:
        for their in theirs:
            their.close()
    return process, [our for our, _ in pairs]


def _begin(
    environ: dict[str, str], serve: Callable[..., None], lanes: list[Connection], arguments: tuple[Any, ...]
) -> None:
    """Run `serve` with the coordinator's environment: the fork inherits the one in which its server started."""
    enter_child()
    set_environment(environ)
    serve(lanes, *arguments)
