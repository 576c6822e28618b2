"""The process that owns a GPU: programs in, outcomes out. It may die; `client` starts the next one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from flywheel.errors import (
    ConfigError,
    FlywheelError,
    GpuFaultError,
    GpuMemoryError,
    InvalidProgramError,
    KernelCompileError,
    LaunchTimeoutError,
    TensorError,
    WeightsError,
)
from flywheel.ir import MegakernelProgram
from flywheel.measure.outcome import Contest, Crashed, NoMemory, Rejected, TimedOut, TrialOutcome
from flywheel.process import enter_child, keep_objects

if TYPE_CHECKING:
    from flywheel.vm.pack.ranks import AnyPacked

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A pickled packed program, to send to a worker. It is made before the program's turn, so no GPU waits for it."""

    data: bytes

    def open(self) -> AnyPacked:
        """The packed program that this parcel holds."""
        packed: AnyPacked = pickle.loads(self.data)
        return packed


WorkerProgram = MegakernelProgram | Parcel
"""A program in a form that a worker takes."""


class Bench(Protocol):
    """Measures programs, which may be packed already."""

    def measure(self, program: MegakernelProgram | AnyPacked) -> TrialOutcome:
        """Load, check and time a validated program. May raise the errors that `answer` turns into outcomes."""
        ...

    def compare(
        self,
        program: MegakernelProgram | AnyPacked,
        rivals: Sequence[MegakernelProgram | AnyPacked],
        rounds: int,
    ) -> Contest:
        """Load and check a candidate `program` and its `rivals`, and time them in turn.

        Each of `rounds` rounds loads all of them again. An error counts as the candidate's fault. A candidate far
        slower than the first rival is not timed to the end. Where a call has the same `rivals` object as the call
        before, the bench may have kept them loaded.
        """
        ...


MakeBench = Callable[[], Bench]
"""Builds the bench, in the process that will use it. It must pickle."""


_TELL: Final[ContextVar[Callable[[WorkerPhase], None]]] = ContextVar("_TELL", default=lambda _: None)


def enter_phase(doing: str, limit_s: float, quiet_s: float = 0.0) -> None:
    """Tell whoever waits for this worker what it does now, in words after "while it", how long that may take, and how
    long it takes on a usual day."""
    _TELL.get()(WorkerPhase(doing, limit_s, quiet_s))


@dataclass(frozen=True, slots=True)
class WorkerPhase:
    """The worker lives, and now does what `doing` says, within `limit_s` wall seconds. Up to `quiet_s` are usual."""

    doing: str
    limit_s: float
    quiet_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The bench is built."""


@dataclass(frozen=True, slots=True)
class Unable:
    """The bench cannot be built."""

    error: FlywheelError


@dataclass(frozen=True, slots=True)
class Question:
    """A program to measure, alone or against rivals. With `rivals` None the last question's rivals hold."""

    program: WorkerProgram
    rivals: tuple[WorkerProgram, ...] | None = ()
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """The outcome of a program. With `last` the process ends after it, since its GPU context is beyond repair."""

    contest: Contest
    last: bool = False


def serve(connection: Connection, make_bench: MakeBench) -> None:
    """Build the bench, then answer questions until the other end closes."""
    enter_child()
    _TELL.set(connection.send)
    enter_phase("gets ready", inf)
    bench = _defended(make_bench)
    if isinstance(bench, Exception):
        connection.send(Unable(_start_error(bench)))
        return
    keep_objects()
    _TELL.set(lambda _: None)  # a question has one limit, from its program to its outcome
    connection.send(Ready())
    rivals: tuple[MegakernelProgram | AnyPacked, ...] = ()
    while (question := _next(connection)) is not None:
        rivals = rivals if question.rivals is None else tuple(map(_opened, question.rivals))
        given = answer(bench, _opened(question.program), rivals, question.rounds)
        connection.send(given)
        if given.last:
            os._exit(0)  # an orderly exit would wait for a GPU that may never answer


def answer(
    bench: Bench,
    program: MegakernelProgram | AnyPacked,
    rivals: tuple[MegakernelProgram | AnyPacked, ...] = (),
    rounds: int = 1,
) -> WorkerReply:
    """The outcome of one program. The bench's errors become outcomes, too."""
    result = _defended(lambda: bench.compare(program, rivals, rounds) if rivals else Contest(bench.measure(program)))
    match result:
        case LaunchTimeoutError():
            return WorkerReply(Contest(TimedOut(result.limit_s, _line(result))))
        case GpuMemoryError():
            return WorkerReply(Contest(NoMemory(_line(result))))
        case KernelCompileError():
            return WorkerReply(Contest(Crashed(f"compile: {_line(result)}", transient=False)))
        case ConfigError() | InvalidProgramError() | TensorError() | WeightsError():
            return WorkerReply(Contest(Rejected(("load",), _line(result))))
        case GpuFaultError():
            return WorkerReply(Contest(Crashed(_line(result), transient=False)), last=True)
        case Exception() if type(result).__name__ == "OutOfMemoryError":  # torch's error; torch is not imported here
            return WorkerReply(Contest(NoMemory(_line(result))), last=True)
        case Exception():
            crashed = Crashed(f"{type(result).__name__}: {_line(result)}", transient=False)
            return WorkerReply(Contest(crashed), last=True)
        case _:
            return WorkerReply(result)


def _opened(work: WorkerProgram) -> MegakernelProgram | AnyPacked:
    return work.open() if isinstance(work, Parcel) else work


def _defended(work: Callable[[], _T]) -> _T | Exception:
    """The result of `work`, or the error that it raised: an unforeseen error ends one trial, not the campaign."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        return error


def _start_error(error: Exception) -> FlywheelError:
    if isinstance(error, FlywheelError):
        return error
    return FlywheelError(f"GPU worker: cannot start: {type(error).__name__}: {_line(error)}")


def _next(connection: Connection) -> Question | None:
    """The next question; None where the other end has closed."""
    try:
        question: Question = connection.recv()
    except (EOFError, OSError):
        return None
    return question


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
