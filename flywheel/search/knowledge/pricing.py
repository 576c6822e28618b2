"""Price many programs on many candidate machines, in several processes. A fit of constants does nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from flywheel.children import start_child
from flywheel.cost_model import Machine
from flywheel.cost_model.calibrate import Price, Sample, price_here
from flywheel.errors import WorkerDiedError
from flywheel.process import enter_child


@contextmanager
def open_pool(jobs: int) -> Iterator[Callable[[Sequence[Sample]], Price]]:
    """A function that makes a Price of samples. With more than one job, that many processes share the samples.

    The processes end with the context. The Price raises WorkerDiedError where one of them dies.
    """
    workers: list[tuple[SpawnProcess, Connection]] = []

    def pool(samples: Sequence[Sample]) -> Price:
        if jobs == 1 or len(samples) < jobs:
            return price_here(samples)
        context = multiprocessing.get_context("spawn")
        shares: list[Connection] = []
        for number in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, samples[number::jobs]), daemon=True)
            start_child(process.start)
            theirs.close()
            workers.append((process, ours))
            shares.append(ours)
        return lambda machines: _price(shares, machines, len(samples))

    try:
        yield pool
    finally:
        for process, ours in workers:
            process.kill()
            process.join()
            ours.close()


def _price(shares: Sequence[Connection], machines: Sequence[Machine], count: int) -> list[list[float]]:
    """Latencies [machines, samples] from the workers. With w workers, worker i has the samples i, i + w, i + 2w, ..."""
    priced = [[0.0] * count for _ in machines]
    try:
        for share in shares:
            share.send(machines)
        for number, share in enumerate(shares):
            for row, found in zip(priced, share.recv(), strict=True):
                row[number :: len(shares)] = found
    except (EOFError, OSError) as error:
        raise WorkerDiedError("a process that predicts died; --jobs 1 goes without") from error
    return priced


def _serve(machines: Connection, samples: Sequence[Sample]) -> None:
    """The main function of a worker's process, which runs until the other end closes."""
    enter_child()
    price = price_here(samples)
    with suppress(EOFError, OSError):
        while True:
            machines.send(price(machines.recv()))
