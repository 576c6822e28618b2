"""Stations in processes of this machine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

from flywheel.children import end_process
from flywheel.errors import FlywheelError, WorkerDiedError
from flywheel.ir import ScheduleConfig
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import Contest
from flywheel.process import prompt_threads
from flywheel.search.trials.evaluate import Prepared
from flywheel.search.trials.forks import fork
from flywheel.search.trials.station import Predicting, Setup, Station
from flywheel.vm.watching import PATIENCE, Patience, answer_of

GREET_S: Final = 60.0
"""Most wall seconds until a station's first word."""

START_S: Final = 960.0
"""Most wall seconds until a station is ready: a little more than its child's start may take."""

CALL_S: Final = 360.0
"""Most wall seconds of one call: a little more than the child's answer may take."""

MEASURE_S: Final = START_S + CALL_S
"""Most wall seconds of a measurement, which includes the start of a new child."""

_LANES: Final = ("prepare", "measure")
"""A station answers calls in one lane one after the other, and calls in different lanes side by side."""

_EXIT_S: Final = 10.0


class ProcessHost:
    """A station in a process of its own, with `environ` added to its environment."""

    def __init__(
        self, name: str, setup: Setup, environ: Mapping[str, str] | None = None, patience: Patience = PATIENCE
    ) -> None:
        self.name: Final = name
        self._patience = patience
        self._setup = setup
        self._environ = dict(environ or {})
        self._process: ForkServerProcess | None = None
        self._lanes: tuple[Connection, ...] = ()

    def start(self) -> Environment:
        """As `Host.start`."""
        self.end(now=True)
        # The dead station's connections stay open: another thread may still read from them.
        self._process, lanes = fork(self.name, serve, len(_LANES), self._setup, self._environ, patience=self._patience)
        self._lanes = tuple(lanes)
        self._call(0, "greet", (), GREET_S, " while it starts", quiet_s=0.0)
        environment: Environment = self._call(0, "ready", (), START_S)
        return environment

    def prepare(self, config: ScheduleConfig) -> Prepared:
        """As `Host.prepare`."""
        prepared: Prepared = self._call(0, "prepare", (config,), CALL_S)
        return prepared

    def measure(self, config: ScheduleConfig, rivals: Sequence[ScheduleConfig], rounds: int) -> tuple[Contest, float]:
        """As `Host.measure`."""
        asked = config, tuple(rivals), rounds
        measured: tuple[Contest, float] = self._call(1, "measure", asked, MEASURE_S)
        return measured

    def end(self, now: bool) -> None:
        """As `Host.end`."""
        process, self._process = self._process, None
        lanes, self._lanes = self._lanes, ()
        if process is None:
            return
        if now or isinstance(self._setup.means, Predicting):  # a station that predicts has nothing to clean up
            process.kill()
        else:
            for lane in lanes:
                lane.close()
        end_process(process, _EXIT_S)

    @property
    def pid(self) -> int | None:
        """The station's process id; None where there is none."""
        return None if self._process is None else self._process.pid

    def _call(
        self, lane: int, method: str, arguments: tuple[Any, ...], limit_s: float, doing: str = "", quiet_s: float = inf
    ) -> Any:
        """The station's answer, within `limit_s`. It says itself what it waits for, unless it is stopped."""
        process, lanes = self._process, self._lanes
        if process is None:
            raise WorkerDiedError(f"{self.name}: has ended")
        with suppress(OSError):  # the station is dead
            lanes[lane].send((method, arguments))
        answer = answer_of(self.name, process, lanes[lane], doing, limit_s, self._patience, quiet_s)
        if isinstance(answer, FlywheelError):
            raise answer
        return answer


def serve(lanes: Sequence[Connection], setup: Setup, environ: Mapping[str, str]) -> None:
    """The main function of a station's process: one thread serves each lane until the other end closes it."""
    threading.excepthook = _end_process
    station = Station(setup, environ)
    threads = [threading.Thread(target=partial(_serve_lane, station, lane), daemon=True) for lane in lanes]
    with prompt_threads():  # so that results leave while the next config is prepared
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    station.close()


def _serve_lane(station: Station, lane: Connection) -> None:
    while True:
        try:
            method, arguments = lane.recv()
        except (EOFError, OSError):
            return
        call: Callable[..., Any] = getattr(station, method)
        try:
            answer = call(*arguments)
        except FlywheelError as error:
            answer = error
        with suppress(OSError):  # the other end is closed: nobody waits for the answer
            lane.send(answer)


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """Report a bug in a thread and end the process, so that nobody waits for its answer."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(1)
