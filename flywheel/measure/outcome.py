"""The outcome of a trial: a closed union in which a latency cannot exist without a passing verdict. And contests:
programs that were launched alternately on one GPU, so that a slow GPU slows all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from flywheel.measure.latency import MeasuredLatency, PredictedLatency
from flywheel.measure.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Measured:
    """Correct and timed on a GPU. Raises ValueError without a passing verdict."""

    latency: MeasuredLatency
    verdict: Verdict

    def __post_init__(self) -> None:
        if self.verdict.passed is not True:
            raise ValueError(f"measured latency {self.latency.median_us} us: its verdict did not pass")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Valid, and timed by a cost model only."""

    latency: PredictedLatency


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused before it ran: by the lowerer or the validator. `codes` are the findings' codes."""

    codes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Incorrect:
    """Ran, and failed the verdict: at least one of its tensors or tokens is wrong."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Implausible:
    """Ran faster than its weights can be read. So the measurement is wrong, and the schedule is not good."""

    latency_us: float
    floor_us: float


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Did not finish within `limit_s`."""

    limit_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """Died. A `transient` death is the infrastructure's failure and is retried; any other is the config's own."""

    reason: str
    transient: bool


@dataclass(frozen=True, slots=True)
class NoMemory:
    """The GPU had less free memory than the program asked for.

    Another process may hold the rest, so this says nothing about the program: a search tries only programs that the
    whole GPU can hold.
    """

    reason: str


TrialOutcome: TypeAlias = Measured | Predicted | Rejected | Incorrect | Implausible | TimedOut | Crashed | NoMemory

OUTCOME_NAMES: Final = (
    "measured", "predicted", "rejected", "incorrect", "implausible", "timed_out", "crashed", "no_memory",
)  # fmt: skip
"""Every name that `outcome_name` gives."""

LASTING_OUTCOMES: Final = ("measured", "predicted", "rejected", "incorrect")
"""Outcomes that another trial of the same program would repeat. A prediction is repeated only by the same predictor."""


def outcome_name(outcome: TrialOutcome) -> str:
    """The outcome's name in rows, tables and logs."""
    match outcome:
        case Measured():
            return "measured"
        case Predicted():
            return "predicted"
        case Rejected():
            return "rejected"
        case Incorrect():
            return "incorrect"
        case Implausible():
            return "implausible"
        case TimedOut():
            return "timed_out"
        case Crashed():
            return "crashed"
        case NoMemory():
            return "no_memory"
        case _:
            assert_never(outcome)


Rounds = tuple[tuple[float, ...], ...]
"""Times of one program in us, by round and sample. A round begins with loading the program again."""


@dataclass(frozen=True, slots=True)
class Contest:
    """The outcome of a program and of the rivals that it was measured with, if any.

    `times_us` has the candidate's samples, then each rival's. Sample i of a round was taken near sample i of the
    others. It is empty without a comparison: without a rival, or if the candidate has no latency.
    """

    outcome: TrialOutcome
    rivals: tuple[TrialOutcome, ...] = ()
    times_us: tuple[Rounds, ...] = ()
