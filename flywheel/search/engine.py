"""Where evaluations run: in this process, or in a pool of processes that may die."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from flywheel.errors import FlywheelError
from flywheel.ir import ScheduleConfig
from flywheel.measure.outcome import Crashed
from flywheel.search.evaluate import Evaluation, Measure, Seen, evaluate
from flywheel.search.workload import Workload


@dataclass(frozen=True, slots=True)
class Bench:
    """What an evaluation needs beside its config; must pickle for a pool."""

    workload: Workload
    open_seen: Callable[[], Seen]
    measure: Measure


class Engine(Protocol):
    """Evaluates configs, up to `width` at a time."""

    @property
    def width(self) -> int:
        """Evaluations that can run side by side."""
        ...

    def submit(self, config: ScheduleConfig) -> Callable[[], Evaluation]:
        """Start an evaluation; calling the result waits for it."""
        ...


class InlineEngine:
    """One evaluation at a time, in this process."""

    width = 1

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._seen = bench.open_seen()

    def submit(self, config: ScheduleConfig) -> Callable[[], Evaluation]:
        """Evaluates when called."""
        return lambda: _evaluate(config, self._bench, self._seen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""


class PoolEngine:
    """`jobs` processes.

    A death costs every running evaluation one retry; the second death of a config is its outcome. Waiting for an
    evaluation raises FlywheelError where processes cannot even start.
    """

    def __init__(self, bench: Bench, jobs: int) -> None:
        self._bench = bench
        self.width = jobs
        self._pool = _pool(bench, jobs)
        with _sheltered():
            for _ in range(jobs):  # start them now: their imports take longer than the first proposals
                self._pool.submit(_ready)

    def submit(self, config: ScheduleConfig) -> Callable[[], Evaluation]:
        """Starts at once where a process is free."""
        future = self._send(config)
        return lambda: self._wait(config, future)

    def _send(self, config: ScheduleConfig) -> Future[Evaluation]:
        with _sheltered():
            try:
                return self._pool.submit(_evaluate_in_worker, config)
            except BrokenProcessPool:
                self._pool = _pool(self._bench, self.width)
                return self._pool.submit(_evaluate_in_worker, config)

    def _wait(self, config: ScheduleConfig, future: Future[Evaluation]) -> Evaluation:
        try:
            return future.result()
        except BrokenProcessPool:
            pass
        with _pool(self._bench, 1) as lone:  # alone, so that a second death is this config's own
            try:
                with _sheltered():
                    entered = lone.submit(_ready)
                entered.result()
            except BrokenProcessPool:
                raise FlywheelError("worker processes: they die before their first trial") from None
            try:
                return lone.submit(_evaluate_in_worker, config).result()
            except BrokenProcessPool:
                return Evaluation(Crashed("the evaluating process died twice", transient=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _pool(bench: Bench, jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_enter_worker, initargs=(bench,))


@contextmanager
def _sheltered() -> Iterator[None]:
    """Processes that start in here inherit a blocked SIGINT, so that Ctrl-C cannot kill them before they ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_bench: Bench
_seen: Seen


def _enter_worker(bench: Bench) -> None:
    global _bench, _seen  # one bench a process, for its whole life
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C drains: the coordinator decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _bench, _seen = bench, bench.open_seen()
    _ = bench.workload.graph
    gc.freeze()


def _die_with_parent() -> None:
    """A coordinator that was killed leaves no process behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """Returns from a process that has entered."""


def _evaluate_in_worker(config: ScheduleConfig) -> Evaluation:
    return _evaluate(config, _bench, _seen)


def _evaluate(config: ScheduleConfig, bench: Bench, seen: Seen) -> Evaluation:
    """Without the cycle collector: a program is tens of thousands of records, which it would walk again and again."""
    gc.disable()
    try:
        return evaluate(config, bench.workload, seen, bench.measure)
    finally:
        gc.enable()
