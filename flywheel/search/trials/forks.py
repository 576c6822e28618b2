"""Processes that begin with everything imported and compiled: forks of one that did it once, beside the coordinator.

Imports and numba's cached code take a process 0.8 s, most of a search of small models. Forks of the coordinator itself
would inherit its threads' locks.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

from flywheel.errors import WorkerDiedError
from flywheel.process import enter_child, set_environment, sheltered, start_fork_server, usable_cores

_NURSERY: Final = ("flywheel.search.trials.nursery",)


MOST_JOBS: Final = 16
"""Processes that predict, where nobody says how many: a sampler asks for few predictions at once."""


def jobs_of(jobs: int | None) -> int:
    """How many processes predict on this machine where `jobs` are asked for: None is one a usable core."""
    return min(usable_cores(), MOST_JOBS) if jobs is None else jobs


def expect_forks() -> None:
    """Say early that there will be some: what they begin from starts now, beside whatever goes on here."""
    start_fork_server(_NURSERY)


def fork(
    name: str, serve: Callable[..., None], lanes: int, *arguments: Any
) -> tuple[ForkServerProcess, list[Connection]]:
    """A process that runs `serve(its ends of the lanes, *arguments)` in this one's environment, and our ends.

    It is no daemon, so it may have children, and ends with this process. Raises WorkerDiedError where none starts.
    """
    expect_forks()
    context = multiprocessing.get_context("forkserver")
    pairs = [context.Pipe() for _ in range(lanes)]
    theirs = [their for _, their in pairs]
    process = context.Process(target=_begin, args=(dict(os.environ), serve, theirs, arguments), name="flywheel-fork")
    try:
        with sheltered():
            process.start()
    except (EOFError, OSError) as error:
        raise WorkerDiedError(f"{name}: no process starts: {str(error) or type(error).__name__}") from error
    finally:
        for their in theirs:
            their.close()
    return process, [our for our, _ in pairs]


def _begin(
    environ: dict[str, str], serve: Callable[..., None], lanes: list[Connection], arguments: tuple[Any, ...]
) -> None:
    """The server's environment is that of its own start."""
    enter_child()
    set_environment(environ)
    serve(lanes, *arguments)
