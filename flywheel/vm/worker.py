"""The process that owns a GPU: programs in, outcomes out. It may die; `client` starts the next one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol, TypeVar

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
from flywheel.measure.contest import Contest
from flywheel.measure.outcome import Crashed, NoMemory, Rejected, TimedOut, TrialOutcome
from flywheel.process import enter_child, keep_objects

if TYPE_CHECKING:
    from flywheel.vm.pack.program import PackedProgram

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed program in the form that crosses to a worker, made before its turn: no GPU waits for that."""

    data: bytes

    def open(self) -> PackedProgram:
        """What was put in."""
        packed: PackedProgram = pickle.loads(self.data)
        return packed


Work = MegakernelProgram | Parcel
"""What a worker is sent."""


class Bench(Protocol):
    """What measures programs, packed or yet to be."""

    def measure(self, program: MegakernelProgram | PackedProgram) -> TrialOutcome:
        """Load, check and time a validated program. May raise what `answer` knows."""
        ...

    def compare(
        self,
        program: MegakernelProgram | PackedProgram,
        rivals: Sequence[MegakernelProgram | PackedProgram],
        rounds: int,
    ) -> Contest:
        """Load and check programs, then time them in turn, `rounds` times from their loading on. The first is the
        candidate, whose fault it is where this raises; a candidate far slower than the first rival is cut short.

        The same `rivals` object as before is the same rivals: they may have stayed loaded.
        """
        ...


MakeBench = Callable[[], Bench]
"""Builds the bench in the process that will use it; must pickle."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The bench is built."""


@dataclass(frozen=True, slots=True)
class Unable:
    """The bench cannot be built."""

    error: FlywheelError


@dataclass(frozen=True, slots=True)
class Question:
    """A program to measure, alone or against rivals; `rivals` of None are those of the question before."""

    program: Work
    rivals: tuple[Work, ...] | None = ()
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a program. With `last` the process ends after it: what it holds of the GPU is beyond repair."""

    contest: Contest
    last: bool = False


def serve(connection: Connection, make_bench: MakeBench) -> None:
    """Build the bench, then answer questions until the other end closes."""
    enter_child()
    bench = _defended(make_bench)
    if isinstance(bench, Exception):
        connection.send(Unable(_start_error(bench)))
        return
    keep_objects()
    connection.send(Ready())
    rivals: tuple[MegakernelProgram | PackedProgram, ...] = ()
    while (question := _next(connection)) is not None:
        rivals = rivals if question.rivals is None else tuple(map(_opened, question.rivals))
        given = answer(bench, _opened(question.program), rivals, question.rounds)
        connection.send(given)
        if given.last:
            os._exit(0)  # an orderly exit would wait for a GPU that may never answer


def answer(
    bench: Bench,
    program: MegakernelProgram | PackedProgram,
    rivals: tuple[MegakernelProgram | PackedProgram, ...] = (),
    rounds: int = 1,
) -> Answer:
    """The outcome of one program; what the bench raises is one too."""
    result = _defended(lambda: bench.compare(program, rivals, rounds) if rivals else Contest(bench.measure(program)))
    match result:
        case LaunchTimeoutError():
            return Answer(Contest(TimedOut(result.limit_s, _line(result))))
        case GpuMemoryError():
            return Answer(Contest(NoMemory(_line(result))))
        case KernelCompileError():
            return Answer(Contest(Crashed(f"compile: {_line(result)}", transient=False)))
        case ConfigError() | InvalidProgramError() | TensorError() | WeightsError():
            return Answer(Contest(Rejected(("load",), _line(result))))
        case GpuFaultError():
            return Answer(Contest(Crashed(_line(result), transient=False)), last=True)
        case Exception() if type(result).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            return Answer(Contest(NoMemory(_line(result))), last=True)
        case Exception():
            return Answer(Contest(Crashed(f"{type(result).__name__}: {_line(result)}", transient=False)), last=True)
        case _:
            return Answer(result)


def _opened(work: Work) -> MegakernelProgram | PackedProgram:
    return work.open() if isinstance(work, Parcel) else work


def _defended(work: Callable[[], _T]) -> _T | Exception:
    """The last line of defence: what nobody foresaw ends one trial, not the campaign."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        return error


def _start_error(error: Exception) -> FlywheelError:
    if isinstance(error, FlywheelError):
        return error
    return FlywheelError(f"GPU worker: cannot start: {type(error).__name__}: {_line(error)}")


def _next(connection: Connection) -> Question | None:
    """The next question; None where there will be none."""
    try:
        question: Question = connection.recv()
    except (EOFError, OSError):
        return None
    return question


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
