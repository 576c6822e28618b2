"""Where evaluations run: what a campaign asks for, and the engine that needs no other process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from flywheel.ir import ScheduleConfig
from flywheel.process import no_collector
from flywheel.search.trials.evaluate import Evaluation, Measure, Seen, evaluate
from flywheel.search.workload import Workload


@dataclass(frozen=True, slots=True)
class Bench:
    """What an evaluation needs beside its config."""

    workload: Workload
    open_seen: Callable[[], Seen]
    measure: Measure


class Engine(Protocol):
    """Evaluates configs, up to `width` at a time."""

    @property
    def width(self) -> int:
        """Evaluations that can run side by side."""
        ...

    def submit(
        self,
        config: ScheduleConfig,
        rivals: Sequence[ScheduleConfig] = (),
        rounds: int = 1,
        limit_us: float | None = None,
    ) -> Callable[[], Evaluation]:
        """Start an evaluation; calling the result waits for it.

        What is predicted to take more than `limit_us` is not measured, unless an earlier trial answers: its outcome is
        that prediction.

        What is measured is measured against `rivals`, configs that were measured before, launched in turn with it,
        `rounds` times from their loading on. In more than one round, no earlier trial answers.
        """
        ...


class InlineEngine:
    """One evaluation at a time, in this process, which has no rivals and no limit."""

    width = 1

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._seen = bench.open_seen()

    def submit(
        self,
        config: ScheduleConfig,
        rivals: Sequence[ScheduleConfig] = (),
        rounds: int = 1,
        limit_us: float | None = None,
    ) -> Callable[[], Evaluation]:
        """Evaluates when called."""
        return lambda: _evaluate(config, self._bench, self._seen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""


def _evaluate(config: ScheduleConfig, bench: Bench, seen: Seen) -> Evaluation:
    with no_collector():
        return evaluate(config, bench.workload, seen, bench.measure)
