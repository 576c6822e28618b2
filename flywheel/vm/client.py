"""The client of a GPU worker process: sends it programs, kills it when it hangs, and replaces it when it dies."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from time import monotonic
from types import TracebackType
from typing import Final, Self

from flywheel.children import end_process, start_child
from flywheel.errors import WorkerDiedError
from flywheel.measure.outcome import Contest, Crashed, TimedOut, TrialOutcome
from flywheel.vm.watching import PATIENCE, Patience, Watch, watched
from flywheel.vm.worker import MakeBench, Question, Ready, Unable, WorkerPhase, WorkerProgram, WorkerReply, serve

_EXIT_S: Final = 5.0
"""Wall seconds that a worker may take to end, once it was told to or was killed."""


_QUIET_S: Final = 30.0
"""Wall seconds of a measurement before a line says so: a final takes some."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in wall seconds: `greet_s` until the worker's first word, `start_s` to build the bench, `answer_s`
    from a program to its outcome.

    Building has phases, which have limits of their own (`worker.enter_phase`). The bench limits each launch, to far
    less than `answer_s`.
    """

    greet_s: float = 60.0
    start_s: float = 900.0
    answer_s: float = 300.0
    patience: Patience = PATIENCE


class Client:
    """Runs one worker process at a time, which builds `make_bench()` and measures with it.

    Outcomes are those of `worker.answer`, and two more. TimedOut means that the client had to kill the worker. Crashed
    means that two workers in a row died over one program: after the first death a new worker tries it again.
    """

    def __init__(self, make_bench: MakeBench, limits: Limits | None = None) -> None:
        self._make_bench = make_bench
        self._limits = limits or Limits()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._greeted = False  # whether the worker has said that it is ready
        self._rivals: tuple[WorkerProgram, ...] = ()  # the rivals that the worker has

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._process is not None:
            self._process.kill()  # nobody waits for a measurement any more
        self.close()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None where there is none."""
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Start a worker where none lives, without waiting for it. `ready` waits, and raises its errors."""
        if self._process is None or (self._greeted and not self._process.is_alive()):
            self.close()
            self._start()

    def ready(self) -> None:
        """Wait for a worker that takes programs; start the first one, and replace a dead one.

        Raises the FlywheelError that `make_bench` raised, or a FlywheelError that says why no worker starts.
        """
        self.begin()
        if not self._greeted:
            self._hear()

    def measure(self, program: WorkerProgram) -> TrialOutcome:
        """The outcome of a program. Raises as `ready` does where no worker starts."""
        return self.compare(program).outcome

    def compare(self, program: WorkerProgram, rivals: tuple[WorkerProgram, ...] = (), rounds: int = 1) -> Contest:
        """As `attempt`, but try the program again after a worker's death. Raises as `ready` where no worker starts."""
        first = self.attempt(program, rivals, rounds)
        if not (isinstance(first.outcome, Crashed) and first.outcome.transient):
            return first
        second = self.attempt(program, rivals, rounds)
        if isinstance(second.outcome, Crashed) and second.outcome.transient:
            reason = f"{first.outcome.reason}, then again: {second.outcome.reason}"
            return Contest(Crashed(reason, transient=False))
        return second

    def close(self) -> None:
        """End the worker, if any."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._greeted = False
        self._rivals = ()
        if connection is not None:
            connection.close()
        if process is not None:
            end_process(process, _EXIT_S)

    def attempt(self, program: WorkerProgram, rivals: tuple[WorkerProgram, ...] = (), rounds: int = 1) -> Contest:
        """Measure a program in turn with `rivals`, if any, for `rounds` rounds. A worker's death is Crashed, transient.

        The client sends one `rivals` object once, however many calls have it. Raises as `ready` does.
        """
        self.ready()
        process, connection, limit_s = self._process, self._connection, self._limits.answer_s
        known, self._rivals = rivals is self._rivals, rivals
        assert process is not None
        assert connection is not None
        answer: WorkerReply | None = None
        # The connection failed: the worker is dead, and its last message may be cut off.
        measuring = self._watched(process, " while it measures", limit_s, _QUIET_S)
        with measuring as watch, suppress(EOFError, OSError):
            connection.send(Question(program, None if known else rivals, rounds))
            answer = connection.recv()
        if answer is None:
            death = death_of(process)
            self.close()
            if watch.late:
                return Contest(TimedOut(limit_s, f"the GPU worker {watch.killed} and was killed"))
            how = f"{watch.killed} and was killed" if watch.killed else f"died: {death}"
            return Contest(Crashed(f"the GPU worker {how}", transient=True))
        if answer.last:
            self.close()
        return answer.contest

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._make_bench), name="flywheel-gpu", daemon=True)
        start_child(process.start)
        theirs.close()  # else a read here would not end with the worker's death
        self._process, self._connection = process, ours

    def _hear(self) -> None:
        """Wait until the worker says whether its bench is built."""
        process, ours, limits = self._process, self._connection, self._limits
        assert process is not None
        assert ours is not None
        hello: WorkerPhase | Ready | Unable | None = None
        end = monotonic() + limits.start_s
        first_s = min(limits.greet_s, limits.start_s)
        starting = self._watched(process, " while it starts", first_s)
        with starting as watch, suppress(EOFError, OSError):
            while isinstance(hello := ours.recv(), WorkerPhase):
                watch.enter(f" while it {hello.doing}", min(hello.limit_s, end - monotonic()), hello.quiet_s)
        match hello:
            case Ready():
                self._greeted = True
                return
            case Unable(error):
                self.close()
                raise error
        death = death_of(process)
        self.close()
        if watch.killed:
            raise WorkerDiedError(f"GPU worker: {watch.killed}{watch.doing}, and was killed")
        raise WorkerDiedError(f"GPU worker: died before it was ready: {death}")

    def _watched(
        self, process: SpawnProcess, doing: str, limit_s: float, quiet_s: float = 0.0
    ) -> AbstractContextManager[Watch]:
        assert process.pid is not None
        return watched("GPU worker", process.pid, doing, limit_s, self._limits.patience, quiet_s)


def death_of(process: SpawnProcess) -> str:
    """How a process ended, in words. Its connection is closed; if it still runs, it is killed."""
    process.join(_EXIT_S)
    code = process.exitcode
    if code is None:
        return "it closed its connection"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
