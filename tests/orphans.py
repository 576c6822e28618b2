"""An owner of children, for tests that kill it: `python -m tests.orphans STATE`, with a file's name as $GO.

It starts a child of each kind. They say who they are, and get busy once there is that file.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, Final, NoReturn

from flywheel.children import start_child, start_program
from flywheel.lifetime import die_with_parent
from flywheel.rivals.rank_processes import run_ranks
from flywheel.search.trials.forks import fork
from flywheel.serve.engine import Engine
from flywheel.vm.client import Client


def _compute() -> NoReturn:
    while True:
        pass


def _hold() -> None:
    """Foreign code that never lets another thread of this process run."""
    ctypes.PyDLL(None).sleep(600)


STATES: Final[dict[str, Callable[[], None]]] = {
    "idle": partial(time.sleep, 600),
    "in a loop": _compute,
    "in foreign code": _hold,
}


def busy(kind: str, state: str) -> Any:
    """Say this process's id, wait for the file, and be in a state for ever."""
    os.write(2, f"orphan {os.getpid()} {kind}\n".encode())
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.05)
    os.write(2, b"busy\n")
    STATES[state]()


def serve(lanes: Sequence[Connection], state: str) -> None:
    """Of a station: start a GPU's worker, then be in a state, too."""
    STARTED.append(begun("worker of a station", state))
    busy("station", state)


def take_rank(rank: int, state: str) -> None:
    busy(f"rank {rank}", state)


def begun(kind: str, state: str) -> Client:
    client = Client(partial(busy, kind, state))
    client.begin()
    return client


def worker(state: str) -> None:
    begun("worker of a GPU", state).ready()


def station(state: str) -> None:
    process, _ = fork("station", serve, 1, state)
    process.join()


def decoder(state: str) -> None:
    Engine(partial(busy, "decoding worker", state), 1).start()


def ranks(state: str) -> None:
    run_ranks("ranks", take_rank, 1, "gloo", 600.0, state)


def program(state: str) -> None:
    """Of which the first process ends at once, and its child does not."""
    child = [sys.executable, "-m", "tests.orphans", state, "program's child"]
    words = [sys.executable, "-c", f"import subprocess; subprocess.Popen({child})"]
    STARTED.append(start_program(words, stderr=None))


def own_program(state: str) -> None:
    words = [sys.executable, "-m", "tests.orphans", state, "program of flywheel", str(os.getpid())]
    STARTED.append(start_child(lambda: subprocess.Popen(words)))


STARTED: Final[list[Any]] = []
KINDS: Final = ("worker of a GPU", "worker of a station", "station", "decoding worker", "rank 0",
                "program's child", "program of flywheel")  # fmt: skip


def main(state: str, kind: str | None = None, parent: str | None = None) -> None:
    if kind is not None:
        if parent is not None:
            die_with_parent(int(parent))
        busy(kind, state)
    for start in (worker, station, decoder, ranks, program, own_program):
        Thread(target=start, args=(state,), daemon=True).start()  # children outlive the thread that asked for them
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
