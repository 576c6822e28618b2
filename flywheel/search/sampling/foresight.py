"""Predictions that choose what a search measures. Their programs are lowered and predicted, but neither proved nor
stored. Only measurements decide which schedule is best."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from time import perf_counter
from types import TracebackType
from typing import Final, Self

from flywheel.children import end_process
from flywheel.cost_model import Predictor, machine_for
from flywheel.errors import ConfigError, WorkerDiedError
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.process import no_collector
from flywheel.search.trials.forks import fork
from flywheel.search.workload import Workload
from flywheel.vm.watching import PATIENCE, answer_of

_PREDICTS: Final = "a process that predicts"
_ANSWER_S: Final = 300.0
"""Most wall seconds of one prediction."""
_EXIT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The predictions that steered a search: the number of configs, the least latency in us, and the wall seconds that
    the search waited for them."""

    count: int = 0
    least_us: float | None = None
    seconds: float = 0.0


def is_calibrated(predictor: Predictor, workload: Workload) -> bool:
    """Whether the predictor's constants were fitted on the workload's kind of GPU, not scaled from another GPU's."""
    machine = predictor.machine or machine_for(workload.target)
    return machine.source != "scaled"


class Foresight:
    """Predicts configs for a sampler.

    With several `jobs`, that many processes predict; they start with the first question and end with this object. With
    one job this process predicts. Each config is predicted once. Latencies do not depend on the number of processes.
    Any thread may ask.
    """

    def __init__(self, workload: Workload, predictor: Predictor, jobs: int) -> None:
        self.jobs: Final = jobs
        self._workload, self._predictor = workload, predictor
        self._known: dict[str, Future[float | None]] = {}  # by config id
        self._wanted: OrderedDict[str, ScheduleConfig] = OrderedDict()  # first those that somebody waits for
        self._changed = threading.Condition()
        self._ended: WorkerDiedError | None = None  # why nothing is predicted any more
        self._threads: list[threading.Thread] = []
        self._waited_s = 0.0

    @property
    def said(self) -> Foreseen:
        """A summary of the predictions so far."""
        with self._changed:
            found = [future.result() for future in self._known.values() if _succeeded(future)]
        return Foreseen(len(found), min((us for us in found if us is not None), default=None), self._waited_s)

    def expect(self, configs: Sequence[ScheduleConfig]) -> None:
        """Announce configs that will be asked for, so that idle processes predict them. With one job, do nothing."""
        if self.jobs > 1:
            self._request(configs, urgent=False)

    def predict(self, configs: Sequence[ScheduleConfig]) -> list[float | None]:
        """The configs' latencies in us; None for a config without a program. Raises WorkerDiedError where a process
        dies."""
        start = perf_counter()
        futures = self._request(configs, urgent=True)
        if self.jobs == 1:
            self._answer(partial(predict_config, workload=self._workload, predictor=self._predictor), lasting=False)
        found = [future.result() for future in futures]
        self._waited_s += perf_counter() - start
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(WorkerDiedError("the processes that predict have ended"))
        for thread in self._threads:
            thread.join()

    def _request(self, configs: Sequence[ScheduleConfig], urgent: bool) -> list[Future[float | None]]:
        named = [(config.config_id, config) for config in configs]
        asked = dict(named)
        with self._changed:
            new = [identity for identity in asked if identity not in self._known]
            self._known |= {identity: Future() for identity in new}
            futures = [self._known[identity] for identity, _ in named]
            late = [identity for identity in self._wanted if identity in asked] if urgent else []
            self._wanted |= {identity: asked[identity] for identity in new}
            for identity in reversed([*late, *new] if urgent else []):
                self._wanted.move_to_end(identity, last=False)
            if self._ended is not None:
                self._fail_wanted(self._ended)
            elif new and self.jobs > 1 and not self._threads:
                self._threads = [threading.Thread(target=self._attend, daemon=True) for _ in range(self.jobs)]
                for thread in self._threads:
                    thread.start()
            self._changed.notify_all()
        return futures

    def _answer(self, predict: Callable[[ScheduleConfig], float | None], lasting: bool) -> None:
        """Predict wanted configs: until none is left or, if `lasting`, until this object ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._wanted or not lasting)
                if self._ended or not self._wanted:
                    return
                identity, config = self._wanted.popitem(last=False)
                future = self._known[identity]
            try:
                future.set_result(predict(config))
            except WorkerDiedError as death:
                future.set_exception(death)
                raise

    def _attend(self) -> None:
        """Run a process from a thread of its own. The process's death ends every prediction."""
        try:
            process, (lane,) = fork(_PREDICTS, _serve, 1, self._workload, self._predictor)
            try:
                self._answer(partial(_ask, process, lane), lasting=True)
            finally:
                process.kill()
                end_process(process, _EXIT_S)
                lane.close()
        except WorkerDiedError as death:
            self._end(death)

    def _end(self, why: WorkerDiedError) -> None:
        with self._changed:
            self._ended = self._ended or why
            self._fail_wanted(self._ended)
            self._changed.notify_all()

    def _fail_wanted(self, why: WorkerDiedError) -> None:
        for identity in self._wanted:
            self._known[identity].set_exception(why)
        self._wanted.clear()


def _ask(process: ForkServerProcess, lane: Connection, config: ScheduleConfig) -> float | None:
    with suppress(OSError):  # it is dead
        lane.send(config)
    try:
        latency_us: float | None = answer_of(_PREDICTS, process, lane, " while it predicts", _ANSWER_S, PATIENCE, 0.0)
    except WorkerDiedError as death:
        raise WorkerDiedError(f"{death}; --jobs 1 goes without") from death
    return latency_us


def _succeeded(future: Future[float | None]) -> bool:
    return future.done() and future.exception() is None


def predict_config(config: ScheduleConfig, workload: Workload, predictor: Predictor) -> float | None:
    """Predicted latency in us of a config's program; None where it has none."""
    with no_collector():
        try:
            return predictor.predict(lower(workload.graph, config, workload.target)).latency_us
        except ConfigError:
            return None


def _serve(lanes: Sequence[Connection], workload: Workload, predictor: Predictor) -> None:
    """The main function of a predicting process, which runs until the other end closes."""
    (asked,) = lanes
    with suppress(EOFError, OSError):
        while True:
            asked.send(predict_config(asked.recv(), workload, predictor))


class Prefilter:
    """Lets a campaign measure a schedule only if its prediction is at most `factor` times the best schedule's."""

    def __init__(self, factor: float, predictor: Predictor, workload: Workload) -> None:
        self._factor, self._predictor, self._workload = factor, predictor, workload
        self._known: dict[str, float | None] = {}  # by config id

    def limit_us(self, best: TrialRecord | None) -> float | None:
        """The largest prediction, in us, of a candidate that is still measured while `best` is the best so far.

        None is no limit: nothing was measured yet, or `best` cannot be predicted.
        """
        if best is None or best.latency_us is None:
            return None
        predicted_us = best.predicted_us if best.predictor == self._predictor.version else self._predict(best)
        return None if predicted_us is None else self._factor * predicted_us

    def _predict(self, best: TrialRecord) -> float | None:
        """This predictor's latency in us of the row's config, whose own prediction may be another predictor's."""
        if best.config_id not in self._known:
            work = self._workload
            try:
                program = lower(work.graph, config_from_dict(json.loads(best.config)), work.target)
                self._known[best.config_id] = self._predictor.predict(program).latency_us
            except ConfigError:  # a row of other versions
                self._known[best.config_id] = None
        return self._known[best.config_id]
