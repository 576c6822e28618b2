"""An engine of many hosts, any of which may die.

Each host has one thread more than the configs that it prepares ahead, so it can prepare one config while it measures
another. The threads only wait: the hosts compute. `Host` is what a fleet asks of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from types import TracebackType
from typing import Final, Protocol, Self

from flywheel.errors import FlywheelError, StoreError, UsageError, WorkerDiedError
from flywheel.ir import ScheduleConfig
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import Contest, Crashed, Predicted
from flywheel.measure.record import TrialRecord
from flywheel.search.trials.evaluate import Evaluation, Prepared


class Host(Protocol):
    """A station in another process, which may die. Then each method but `end` raises WorkerDiedError.

    `start` replaces a dead station. `prepare` and `measure` may be called side by side. They also raise the station's
    own errors.
    """

    @property
    def name(self) -> str:
        """The host's name in messages."""
        ...

    def start(self) -> Environment:
        """Start a fresh station, whatever became of the last one, and wait for it; return its environment."""
        ...

    def prepare(self, config: ScheduleConfig) -> Prepared:
        """As `Station.prepare`."""
        ...

    def measure(self, config: ScheduleConfig, rivals: Sequence[ScheduleConfig], rounds: int) -> tuple[Contest, float]:
        """As `Station.measure`."""
        ...

    def end(self, now: bool) -> None:
        """End the station: after its work, or with `now` at once."""
        ...


Look = Callable[[str, Environment], TrialRecord | None]
"""The earlier trial of this program id that need not be repeated in that environment; None where there is none."""

DEATHS: Final = 2
"""A config is Crashed once this many hosts died while they evaluated it."""

STARTS: Final = 5
"""Starts in a row in which a host may die before the fleet gives it up."""
PAUSE_S: Final = 0.1
"""Wall seconds before a host's second start. Each later pause is twice as long."""
START_AGAIN_S: Final = 120.0
"""Wall seconds of starts after which a dead host is not started again: a death so late is no accident."""

_END_S: Final = 0.2

_ALIKE: Final = ("flywheel_version", "ir_version", "gpu", "driver", "nvrtc", "kernels")
"""Facts that all hosts that measure must share, since their latencies are compared."""


class _ProgramGoneError(Exception):
    """The host that prepared this config died over another config before this one's turn."""


@dataclass(eq=False, slots=True)
class _FleetTask:
    config: ScheduleConfig
    rivals: Sequence[ScheduleConfig]
    rounds: int
    limit_us: float | None = None
    future: Future[Evaluation] = field(default_factory=Future)
    prepared: Prepared | None = None
    deaths: list[str] = field(default_factory=list)
    died_at: _Post | None = None


@dataclass(eq=False, slots=True)
class _Post:
    """A host and its tasks. `life` counts its starts. `up` is None while it starts."""

    host: Host
    up: bool | None = None
    life: int = 0
    environment: Environment | None = None
    running: list[_FleetTask] = field(default_factory=list)
    starting: threading.Lock = field(default_factory=threading.Lock)
    preparing: threading.Lock = field(default_factory=threading.Lock)
    measuring: threading.Lock = field(default_factory=threading.Lock)


class Fleet:
    """Evaluates configs on `hosts`. Each host prepares `ahead` configs beside the one that it measures, and `queued`
    more wait for the host that is free first.

    When a host dies, the fleet retries each config that the host had, alone on a host, and on another host if there is
    one. A config's second death is its outcome. A host that dies while it starts is started again, STARTS times in all,
    and then given up. Once every host is given up, each evaluation raises the reason. `look` runs in this process,
    which has the store. With `measured`, all hosts must be alike.
    """

    def __init__(
        self, hosts: Sequence[Host], look: Look, *, ahead: int = 0, queued: int = 0, measured: bool = False
    ) -> None:
        self.width: Final = len(hosts) * (1 + ahead) + queued
        self._posts: Final = [_Post(host) for host in hosts]
        self._look = look
        self._measured = measured
        self._changed = threading.Condition()
        self._queue: list[_FleetTask] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(post,), daemon=True)
            for post in self._posts
            for _ in range(1 + ahead)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for post in self._posts:
            post.host.end(now=kind is not None or post.up is None or bool(post.running))
        while any(thread.is_alive() for thread in self._threads):  # one may be starting its host again
            for post in self._posts:
                post.host.end(now=True)
            for thread in self._threads:
                thread.join(_END_S)

    def ready(self) -> list[Environment]:
        """Wait for every host, and return their environments.

        Raises the error of a host that cannot start, and UsageError where hosts are not alike.
        """
        with self._changed:
            self._changed.wait_for(lambda: all(post.up is not None for post in self._posts))
            if not all(post.up for post in self._posts):
                assert self._failure is not None
                raise self._failure
            return [post.environment for post in self._posts if post.environment is not None]

    def submit(
        self,
        config: ScheduleConfig,
        rivals: Sequence[ScheduleConfig] = (),
        rounds: int = 1,
        limit_us: float | None = None,
    ) -> Callable[[], Evaluation]:
        """As `Engine.submit`."""
        task = _FleetTask(config, rivals, rounds, limit_us)
        with self._changed:
            self._queue.append(task)
            self._settle()
            self._changed.notify_all()
        return task.future.result

    def _work(self, post: _Post) -> None:
        try:
            self._serve(post)
        except BaseException as error:  # a bug, which must not leave others waiting for ever
            with self._changed:
                for task in post.running:
                    task.future.set_exception(error)
                post.running.clear()
            self._give_up(post, error)
            raise

    def _serve(self, post: _Post) -> None:
        self._start(post, life=0)
        while (task := self._take(post)) is not None:
            life = post.life
            try:
                evaluation = self._evaluate(post, life, task)
            except WorkerDiedError as death:
                self._bury(post, task, str(death))
                self._start(post, life)
            except _ProgramGoneError:
                self._put_back(post, task)
            except StoreError as error:
                self._finish(post, task).set_exception(error)
            except FlywheelError as error:  # the host is alive but cannot measure
                self._put_back(post, task)
                self._give_up(post, error)
            else:
                self._deliver(post, task, evaluation)

    def _evaluate(self, post: _Post, life: int, task: _FleetTask) -> Evaluation:
        with _turn(post, post.preparing, life):
            task.prepared = prepared = post.host.prepare(task.config)
        if prepared.refused is not None:
            return prepared.ended(prepared.refused)
        assert prepared.program_id is not None
        assert post.environment is not None
        known = self._look(prepared.program_id, post.environment) if task.rounds == 1 else None
        if known is not None:
            return prepared.ended(known)
        if prepared.answer is not None:
            return prepared.ended(prepared.answer, prepared.answer_s)
        predicted = prepared.predicted
        if task.limit_us is not None and predicted is not None and predicted.latency_us > task.limit_us:
            return prepared.ended(Predicted(predicted))
        with _turn(post, post.measuring, life):
            contest, measure_s = post.host.measure(task.config, task.rivals, task.rounds)
        ended = prepared.ended(contest.outcome, measure_s)
        return replace(ended, contest=contest, environment=post.environment)

    def _deliver(self, post: _Post, task: _FleetTask, evaluation: Evaluation) -> None:
        """Set a task's result. The death of a host's child counts as the host's own death."""
        outcome = evaluation.outcome
        if isinstance(outcome, Crashed) and outcome.transient:
            self._bury(post, task, outcome.reason)
            return
        self._finish(post, task).set_result(evaluation)

    def _finish(self, post: _Post, task: _FleetTask) -> Future[Evaluation]:
        """Take a task off its host, and return the future for its result."""
        with self._changed:
            post.running.remove(task)
            self._changed.notify_all()
        return task.future

    def _bury(self, post: _Post, task: _FleetTask, death: str) -> None:
        task.deaths.append(death)
        task.died_at = post
        if len(task.deaths) < DEATHS:
            self._put_back(post, task)
            return
        reason = f"{task.deaths[0]}, then again: {task.deaths[1]}"
        prepared = task.prepared or Prepared(None, None)
        crashed = prepared.ended(Crashed(reason, transient=False))
        self._finish(post, task).set_result(replace(crashed, environment=post.environment))

    def _put_back(self, post: _Post, task: _FleetTask) -> None:
        with self._changed:
            post.running.remove(task)
            self._queue.insert(0, task)
            self._changed.notify_all()

    def _start(self, post: _Post, life: int) -> None:
        """Start a host that was started `life` times. Do nothing where another thread has started it again."""
        with post.starting:
            if post.life != life or self._closing:
                return
            with self._changed:
                post.life += 1
                post.up = None
            post.host.end(now=True)  # so that pending calls to it end
            try:
                with post.preparing, post.measuring:
                    environment = self._start_host(post.host)
                with self._changed:
                    self._check_alike(post, environment)
                    post.environment, post.up = environment, True
                    self._changed.notify_all()
            except WorkerDiedError as death:
                self._give_up(post, FlywheelError(f"worker {death}, before its first trial"))
            except FlywheelError as error:
                self._give_up(post, error)

    def _start_host(self, host: Host) -> Environment:
        """Start a host, and start it again where it dies meanwhile.

        Raises the WorkerDiedError of its last death, and any other error of its start.
        """
        begun = monotonic()
        for attempt in range(STARTS - 1):
            try:
                return host.start()
            except WorkerDiedError:
                if monotonic() - begun > START_AGAIN_S:
                    raise
                with self._changed:  # what starts the host may be about to end, too
                    if self._changed.wait_for(lambda: self._closing, PAUSE_S * 2**attempt):
                        raise
        return host.start()

    def _check_alike(self, post: _Post, environment: Environment) -> None:
        others = [other.environment for other in self._posts if other is not post and other.environment is not None]
        for field_name in _ALIKE if self._measured else ():
            mine = getattr(environment, field_name)
            for other in others:
                theirs = getattr(other, field_name)
                if mine != theirs:
                    raise UsageError(
                        f"workers: {field_name} is {theirs} on {other.host} and {mine} on {environment.host}; "
                        "those of one campaign must be alike"
                    )

    def _give_up(self, post: _Post, error: BaseException) -> None:
        with self._changed:
            post.up = False
            self._failure = error
            self._settle()
            self._changed.notify_all()
        post.host.end(now=True)

    def _settle(self) -> None:
        """Fail every queued task once no host is left to take it."""
        if all(post.up is False for post in self._posts):
            assert self._failure is not None
            for task in self._queue:
                task.future.set_exception(self._failure)
            self._queue.clear()

    def _take(self, post: _Post) -> _FleetTask | None:
        """Wait for the next task of a host; None where no more will come."""
        with self._changed:
            while not self._closing and post.up is not False:
                task = self._next(post) if post.up else None
                if task is not None:
                    self._queue.remove(task)
                    post.running.append(task)
                    return task
                self._changed.wait()
        return None

    def _next(self, post: _Post) -> _FleetTask | None:
        if any(running.deaths for running in post.running):
            return None  # a config that is retried is alone on its host
        elsewhere = any(other.up for other in self._posts if other is not post)
        for task in self._queue:
            if not task.deaths:
                return task
            if task.died_at is not post or not elsewhere:
                return None if post.running else task
        return None


@contextmanager
def _turn(post: _Post, lock: threading.Lock, life: int) -> Iterator[None]:
    """Hold the lock of a host's method. Raises _ProgramGoneError where the host was started anew or given up."""
    with lock:
        if post.life != life or not post.up:
            raise _ProgramGoneError
        yield
