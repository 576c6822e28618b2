"""A station prepares configs, and predicts them itself or measures them in a child that may be killed.

`processes` puts a station into a process of this machine, `cluster` into a Ray actor. Both import this module early, so
it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Final

from flywheel.cost_model import Predictor
from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.measure.environment import Environment, capture_environment
from flywheel.measure.outcome import Contest
from flywheel.measure.tenants import Attendant
from flywheel.process import keep_objects, no_collector, set_environment
from flywheel.search.trials.evaluate import Measure, Prepared, prepare
from flywheel.search.workload import Workload
from flywheel.vm.client import Client, Limits
from flywheel.vm.worker import MakeBench, WorkerProgram

_KEPT: Final = 8
"""Programs that a station keeps: the last prepared ones, which may be measured yet, and the last rivals."""

Attend = Callable[[Callable[[float], bool]], Attendant]


@dataclass(frozen=True, slots=True)
class Predicting:
    """The function `measure` gives latencies. It must pickle, as must all of a Setup.

    With `at_once`, `prepare` calls it, so its caller needs no second call for the latency.
    """

    measure: Measure
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Measuring:
    """A bench measures latencies, in a child of the station.

    Before a program's turn, `compile_ahead` compiles its kernel, and `wrap` makes the object that the child gets.
    `compile_all` compiles every kernel in the background, before a program needs it, until its argument returns True.
    `attend` makes what waits for a quiet GPU, of a function that pauses as `Attendant` has it.
    """

    make_bench: MakeBench
    compile_ahead: Callable[[MegakernelProgram], None] | None = None
    wrap: Callable[[MegakernelProgram], WorkerProgram] | None = None
    limits: Limits = field(default_factory=Limits)
    compile_all: Callable[[Callable[[], bool]], None] | None = None
    attend: Attend | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What a station does. `capture` describes its machine. With a `predictor`, it predicts each config it prepares."""

    workload: Workload
    means: Predicting | Measuring
    capture: Callable[[], Environment] = capture_environment
    predictor: Predictor | None = None


def _answered(prepared: Prepared, measure: Measure) -> Prepared:
    """`prepared` with the outcome that `measure` gives its program; unchanged where it was refused."""
    if prepared.refused is not None or prepared.program is None:
        return prepared.facts
    start = perf_counter()
    with no_collector():
        answer = measure(prepared.program)
    return replace(prepared.facts, answer=answer, answer_s=perf_counter() - start)


@dataclass(frozen=True, slots=True)
class _PreparedWork:
    """A prepared config, and the object that the child gets; None where there is no program."""

    prepared: Prepared
    work: WorkerProgram | None


class Station:
    """Prepares and measures configs in one place. `prepare` and `measure` may run side by side, each once at a time."""

    def __init__(self, setup: Setup, environ: Mapping[str, str]) -> None:
        set_environment(environ)
        self._setup = setup
        self._making: Final = Lock()
        self._made: dict[str, _PreparedWork] = {}  # by config id, oldest first
        self._rivals: tuple[tuple[str, ...], tuple[WorkerProgram, ...]] = ((), ())
        self._client: Client | None = None
        self._attendant: Attendant | None = None
        self._closing = Event()
        self._compiling: Thread | None = None
        match setup.means:
            case Measuring(make_bench=make_bench, limits=limits, compile_all=compile_all):
                self._client = Client(make_bench, limits)
                if compile_all is not None:
                    self._compiling = Thread(target=compile_all, args=(self._closing.is_set,), daemon=True)

    def greet(self) -> None:
        """Answer, since the station lives."""

    def ready(self) -> Environment:
        """Wait until the station can measure, and return its environment.

        Raises the errors of `capture`, and the error of a child that cannot start.
        """
        if self._client is not None:
            self._client.begin()  # first, since it takes longest
        environment = self._setup.capture()
        if self._compiling is not None:
            self._compiling.start()
        if self._client is not None:
            self._client.ready()
        _ = self._setup.workload.graph
        keep_objects()
        return environment

    def prepare(self, config: ScheduleConfig) -> Prepared:
        """Lower and validate a config, and compile its kernel ahead. The result is without the program."""
        made, predictor, means = self._make(config), self._setup.predictor, self._setup.means
        if isinstance(means, Predicting) and means.at_once:
            return _answered(made.prepared, means.measure)
        with self._making:
            self._made[config.config_id] = made
            while len(self._made) > _KEPT:
                del self._made[next(iter(self._made))]
        prepared = made.prepared
        if predictor is not None and prepared.refused is None and prepared.program is not None:
            with no_collector():
                prepared = replace(prepared, predicted=predictor.predict(prepared.program))
        return prepared.facts

    def measure(self, config: ScheduleConfig, rivals: Sequence[ScheduleConfig], rounds: int) -> tuple[Contest, float]:
        """(the result of a config that was not refused, wall seconds of its measurement).

        It waits for a quiet GPU first, and is repeated where others disturbed it; the seconds are those of the last
        time. A child's death is Crashed and transient. Where a rival is refused today, the config is measured without
        rivals. Raises the error of a child that cannot start.
        """
        with self._making:
            kept = self._made.pop(config.config_id, None)
        made = kept or self._make(config)
        assert made.prepared.program is not None
        assert made.work is not None
        names = tuple(rival.config_id for rival in rivals)
        if names != self._rivals[0]:
            found = [self._make(rival) for rival in rivals]
            able = tuple(each.work for each in found if each.prepared.refused is None and each.work is not None)
            self._rivals = names, able if len(able) == len(rivals) else ()
        if self._client is not None:
            self._client.ready()  # so that no trial's time includes a new child's start
        match self._setup.means:
            case Predicting(measure):
                start = perf_counter()
                return Contest(measure(made.prepared.program)), perf_counter() - start
            case Measuring(attend=attend):
                return self._attempt(made.work, rounds, attend)

    def _attempt(self, work: WorkerProgram, rounds: int, attend: Attend | None) -> tuple[Contest, float]:
        client, rivals = self._client, self._rivals[1]
        assert client is not None
        start = perf_counter()

        def attempt() -> Contest:
            nonlocal start
            start = perf_counter()
            return client.attempt(work, rivals, rounds)

        if attend is None:
            contest = attempt()
        else:
            self._attendant = self._attendant or attend(self._closing.wait)
            contest = self._attendant.measured(attempt, rivals if rounds == 1 else None)
        return contest, perf_counter() - start

    def close(self) -> None:
        """End the child, if any, and stop the compilation of further kernels.

        The kernel under way is compiled to its end: the compiler cannot be cut short without harm to the process.
        """
        self._closing.set()
        if self._client is not None:
            self._client.close()
        if self._compiling is not None and self._compiling.is_alive():
            self._compiling.join()

    def _make(self, config: ScheduleConfig) -> _PreparedWork:
        with no_collector():
            prepared = prepare(config, self._setup.workload)
            program = prepared.program
            if prepared.refused is not None or program is None:
                return _PreparedWork(prepared, program)
            match self._setup.means:
                case Measuring(compile_ahead=compile_ahead, wrap=wrap):
                    if compile_ahead is not None:
                        compile_ahead(program)
                    return _PreparedWork(prepared, program if wrap is None else wrap(program))
            return _PreparedWork(prepared, program)
