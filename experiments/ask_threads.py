"""Times an ask of the sampler `local` with the threads that BLAS takes by default, and with one: alone, and beside
processes that keep every core busy, as those that evaluate trials do.

    python experiments/ask_threads.py

The known trials are random, with made-up latencies. Times are of one ask and tell, the mean of ASKS.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np  # loads the BLAS that is looked at
from threadpoolctl import threadpool_info

from flywheel.process import one_blas_thread
from flywheel.search.knobs import Choice
from flywheel.search.sampling import study
from flywheel.search.space import Space, make_space
from flywheel.search.workload import make_workload

KNOWN = (40, 120, 200)
ASKS = 10
BUSY = 2
"""Processes of each core."""
WORK = ("llama3-8b", "h100", "bf16", 512)


def main() -> int:
    """Print a row for each number of known trials."""
    space = make_space(make_workload(*WORK))
    threads = max(pool["num_threads"] for pool in threadpool_info())
    print(f"{WORK[0]} on {WORK[1]}, {len(space.dimensions)} knobs; numpy {np.__version__}, {threads} threads of BLAS")
    print(f"{'busy':>6} {'known':>6} {'threads':>8} {'wall ms':>9} {'CPU ms':>8}")
    for busy in (0, BUSY * (os.cpu_count() or 1)):
        with processes(busy):
            for known in KNOWN:
                for count, limit in ((threads, nullcontext), (1, one_blas_thread)):
                    study.one_blas_thread = limit  # type: ignore[attr-defined]
                    wall_ms, cpu_ms = ask_ms(space, known)
                    print(f"{busy:6d} {known:6d} {count:8d} {wall_ms:9.1f} {cpu_ms:8.1f}", flush=True)
    return 0


@contextmanager
def processes(count: int) -> Iterator[None]:
    """Processes that do nothing but compute."""
    begun = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for each in begun:
        each.start()
    try:
        yield
    finally:
        for each in begun:
            each.kill()
            each.join()


def spin() -> None:
    """Compute for ever."""
    while True:
        pass


def ask_ms(space: Space, known: int) -> tuple[float, float]:
    """Wall and CPU milliseconds of an ask and a tell behind `known` trials."""
    chance = random.Random(0)
    trials = [(drawn(space, chance), 5000.0 * (1.0 + chance.random())) for _ in range(known)]
    asked = study.CampaignStudy(space, "local", 0, trials)
    asked.tell(asked.ask()[0], 9000.0)
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(ASKS):
        asked.tell(asked.ask()[0], 9000.0 + number)
    return tuple((end - start) / ASKS * 1e3 for start, end in ((wall, time.perf_counter()), (cpu, time.process_time())))


def drawn(space: Space, chance: random.Random) -> Choice:
    """A choice of the space."""
    return {dimension.name: chance.choice(dimension.values) for dimension in space.dimensions}


if __name__ == "__main__":
    sys.exit(main())
