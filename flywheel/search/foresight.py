"""Predictions that steer a search and are no trials: lowered and priced, neither proved nor kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from time import perf_counter
from types import TracebackType
from typing import Final, Self

from flywheel.cost_model import Predictor, machine_for
from flywheel.errors import ConfigError, WorkerDiedError
from flywheel.ir import ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.process import no_collector
from flywheel.search.forks import fork
from flywheel.search.workload import Workload


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What was predicted to steer a search, in all: configs, the least latency of any, and wall seconds."""

    count: int = 0
    least_us: float | None = None
    seconds: float = 0.0


def is_calibrated(predictor: Predictor, workload: Workload) -> bool:
    """Whether its constants come from such a GPU, and are not scaled from another one's."""
    machine = predictor.machine or machine_for(workload.target)
    return machine.source != "scaled"


class Foresight:
    """The cost model at a sampler's wish: `budget` configs before it proposes anything.

    It runs in `jobs` processes, which start with the first question and end with this; with one job, here.

    Latencies do not depend on the number of processes.
    """

    def __init__(self, workload: Workload, predictor: Predictor, budget: int, jobs: int) -> None:
        self.budget: Final = budget
        self.said = Foreseen()
        self._workload, self._predictor, self._jobs = workload, predictor, jobs
        self._workers: list[tuple[ForkServerProcess, Connection]] = []

    def predict(self, configs: Sequence[ScheduleConfig]) -> list[float | None]:
        """Latencies in us, None where a config has no program. Raises WorkerDiedError where a process dies."""
        start = perf_counter()
        found = self._share(configs) if self._jobs > 1 and len(configs) > 1 else self._here(configs)
        least = min((us for us in (*found, self.said.least_us) if us is not None), default=None)
        self.said = Foreseen(self.said.count + len(found), least, self.said.seconds + perf_counter() - start)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, ours in self._workers:
            process.kill()
            process.join()
            ours.close()
        self._workers.clear()

    def _here(self, configs: Sequence[ScheduleConfig]) -> list[float | None]:
        return [predict_config(config, self._workload, self._predictor) for config in configs]

    def _share(self, configs: Sequence[ScheduleConfig]) -> list[float | None]:
        """Of the configs, every process has each one that is as many places behind its first as there are processes."""
        if not self._workers:
            self._workers = [self._start() for _ in range(self._jobs)]
        found: list[float | None] = [None] * len(configs)
        try:
            for number, (_, worker) in enumerate(self._workers):
                worker.send(configs[number :: self._jobs])
            for number, (_, worker) in enumerate(self._workers):
                found[number :: self._jobs] = worker.recv()
        except (EOFError, OSError) as error:
            raise WorkerDiedError("a process that predicts died; --jobs 1 goes without") from error
        return found

    def _start(self) -> tuple[ForkServerProcess, Connection]:
        process, lanes = fork("a process that predicts", _serve, 1, self._workload, self._predictor)
        return process, lanes[0]


def predict_config(config: ScheduleConfig, workload: Workload, predictor: Predictor) -> float | None:
    """Predicted latency in us of a config's program; None where it has none."""
    with no_collector():
        try:
            return predictor.predict(lower(workload.graph, config, workload.target)).latency_us
        except ConfigError:
            return None


def _serve(lanes: Sequence[Connection], workload: Workload, predictor: Predictor) -> None:
    """A process of its own: until the other end closes."""
    (asked,) = lanes
    with suppress(EOFError, OSError):
        while True:
            asked.send([predict_config(config, workload, predictor) for config in asked.recv()])
