"""Price many programs on many candidate machines, in several processes. A fit of constants does nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Final

from flywheel.children import end_process, start_child
from flywheel.cost_model import Machine
from flywheel.cost_model.calibrate import PriceSamples, Sample, price_here
from flywheel.errors import WorkerDiedError
from flywheel.process import enter_child
from flywheel.vm.watching import PATIENCE, answer_of

_ANSWER_S: Final = 900.0
"""Most wall seconds in which a process prices its samples on some machines."""
_QUIET_S: Final = 60.0
"""Wall seconds until a line says that a process takes long, which is usual."""
_EXIT_S: Final = 5.0


@contextmanager
def open_pool(jobs: int) -> Iterator[Callable[[Sequence[Sample]], PriceSamples]]:
    """A function that makes a `PriceSamples`. With more than one job, that many processes share the samples.

    The processes end with the context. A `PriceSamples` raises WorkerDiedError where one of them dies.
    """
    workers: list[tuple[SpawnProcess, Connection]] = []

    def pool(samples: Sequence[Sample]) -> PriceSamples:
        if jobs == 1 or len(samples) < jobs:
            return price_here(samples)
        context = multiprocessing.get_context("spawn")
        shares: list[tuple[SpawnProcess, Connection]] = []
        for number in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, samples[number::jobs]), daemon=True)
            start_child(process.start)
            theirs.close()
            workers.append((process, ours))
            shares.append((process, ours))
        return lambda machines: _price(shares, machines, len(samples))

    try:
        yield pool
    finally:
        for process, ours in workers:
            process.kill()
            end_process(process, _EXIT_S)
            ours.close()


def _price(
    shares: Sequence[tuple[SpawnProcess, Connection]], machines: Sequence[Machine], count: int
) -> list[list[float]]:
    """Latencies [machines, samples] from the workers. With w workers, worker i has the samples i, i + w, i + 2w, ..."""
    priced = [[0.0] * count for _ in machines]
    for _, lane in shares:
        with suppress(OSError):  # its process is dead
            lane.send(machines)
    try:
        for number, share in enumerate(shares):
            rows = answer_of("a process that predicts", *share, " while it predicts", _ANSWER_S, PATIENCE, _QUIET_S)
            for row, found in zip(priced, rows, strict=True):
                row[number :: len(shares)] = found
    except WorkerDiedError as death:
        raise WorkerDiedError(f"{death}; --jobs 1 goes without") from death
    return priced


def _serve(machines: Connection, samples: Sequence[Sample]) -> None:
    """The main function of a worker's process, which runs until the other end closes."""
    enter_child()
    price = price_here(samples)
    with suppress(EOFError, OSError):
        while True:
            machines.send(price(machines.recv()))
