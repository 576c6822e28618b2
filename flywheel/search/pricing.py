"""Pricing many programs on many imagined machines, which is all that a fit does, in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager

from flywheel.cost_model import Machine
from flywheel.cost_model.calibrate import Price, Sample, price_here
from flywheel.errors import WorkerDiedError
from flywheel.vm.child import enter_child, sheltered

_share: list[Price] = []
"""In a process of the pool: prices its samples."""


@contextmanager
def open_pool(jobs: int) -> Iterator[Callable[[Sequence[Sample]], Price]]:
    """Something that makes a Price of samples; with more than one job, that many processes share them.

    What it makes raises WorkerDiedError where one of these dies.
    """
    with ExitStack() as stack:

        def pool(samples: Sequence[Sample]) -> Price:
            if jobs == 1 or len(samples) < jobs:
                return price_here(samples)
            context = multiprocessing.get_context("spawn")
            executors = [
                stack.enter_context(
                    ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(samples[number::jobs],))
                )
                for number in range(jobs)
            ]

            def price(machines: Sequence[Machine]) -> list[list[float]]:
                priced = [[0.0] * len(samples) for _ in machines]
                try:
                    with sheltered():
                        shares = [executor.submit(_price, machines) for executor in executors]
                    for number, share in enumerate(shares):
                        for row, found in zip(priced, share.result(), strict=True):
                            row[number::jobs] = found
                except BrokenProcessPool as error:
                    raise WorkerDiedError("a process that predicts died; --jobs 1 goes without") from error
                return priced

            return price

        yield pool


def _begin(samples: Sequence[Sample]) -> None:
    enter_child()
    _share.append(price_here(samples))


def _price(machines: Sequence[Machine]) -> Sequence[Sequence[float]]:
    return _share[0](machines)
