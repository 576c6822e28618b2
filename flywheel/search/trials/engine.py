"""Engines, which evaluate configs for a campaign: the protocol, and the engine that needs no other process."""

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
class EvaluationSetup:
    """What an evaluation needs beside its config."""

    workload: Workload
    seen: Seen
    measure: Measure


class TrialEngine(Protocol):
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
        """Start an evaluation. A call of the result waits for it.

        The engine does not measure a config whose prediction exceeds `limit_us`: the prediction is then its outcome,
        unless an earlier trial of the program answers.

        A measured config is launched in turn with `rivals`, which are configs that were measured before. All of them
        are loaded and measured `rounds` times. With more than one round, no earlier trial answers.
        """
        ...


class InlineEngine:
    """Evaluates one config at a time, in this process, without rivals or limits."""

    width = 1

    def __init__(self, bench: EvaluationSetup) -> None:
        self._bench = bench

    def submit(
        self,
        config: ScheduleConfig,
        rivals: Sequence[ScheduleConfig] = (),
        rounds: int = 1,
        limit_us: float | None = None,
    ) -> Callable[[], Evaluation]:
        """As `TrialEngine.submit`. The evaluation runs when the result is called."""
        return lambda: _evaluate(config, self._bench)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: nothing has to end."""


def _evaluate(config: ScheduleConfig, bench: EvaluationSetup) -> Evaluation:
    with no_collector():
        return evaluate(config, bench.workload, bench.seen, bench.measure)
