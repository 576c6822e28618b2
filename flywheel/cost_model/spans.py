"""What each SM does at any time of a launch: the spans of its tasks, and their states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What an SM does. Every moment of an SM in a launch has one state."""

    MULTIPLY = "multiply"
    """Its matrix warps multiply."""
    STAGE = "stage"
    """It makes the vector to multiply (loads, norms, merges) and stages it."""
    OTHER = "other"
    """Its other work: sums, attention, stores, signals."""
    STARVE = "starve"
    """It has the vector and waits for weights."""
    WAIT = "wait"
    """It waits for what other SMs have yet to write."""
    IDLE = "idle"
    """It has no task."""


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """When a task ran, in us from the start of the launch.

    Its SM came to it at `came_us`. It started at `start_us`, when its counters were complete, and had signalled at
    `end_us`. In between, the SM was in the states STAGE, MULTIPLY and OTHER for as long as said here, and else in
    STARVE.
    """

    task: int
    sm: int
    came_us: float
    start_us: float
    end_us: float
    stage_us: float = 0.0
    multiply_us: float = 0.0
    other_us: float = 0.0

    @property
    def worked_us(self) -> float:
        """The time in which the SM neither waited nor starved."""
        return self.stage_us + self.multiply_us + self.other_us

    def stretches(self) -> Iterator[tuple[State, float, float]]:
        """(state, start, end) without gaps from `came_us` to `end_us`.

        Only the lengths are known within a task. They follow each other as if all starving came before the first
        multiplication.
        """
        yield State.WAIT, self.came_us, self.start_us
        starved_us = max(0.0, self.end_us - self.start_us - self.worked_us)
        at = self.start_us
        for state, took in (
            (State.STAGE, self.stage_us), (State.STARVE, starved_us), (State.MULTIPLY, self.multiply_us),
        ):  # fmt: skip
            end = min(self.end_us, at + took)
            yield state, at, end
            at = end
        yield State.OTHER, at, self.end_us


def state_shares(spans: Iterable[TaskSpan], sms: int, start_us: float, end_us: float) -> dict[State, float]:
    """The share of each state in the time of `sms` SMs from `start_us` to `end_us`; their sum is 1."""
    spent = dict.fromkeys(State, 0.0)
    for span in spans:
        if span.end_us > start_us and span.came_us < end_us:
            for state, start, end in span.stretches():
                spent[state] += max(0.0, min(end, end_us) - max(start, start_us))
    whole = sms * (end_us - start_us)
    if whole <= 0.0:
        return spent | {State.IDLE: 1.0}
    spent[State.IDLE] = max(0.0, whole - sum(spent.values()))
    return {state: us / whole for state, us in spent.items()}
