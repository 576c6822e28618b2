"""What a fleet asks of a place where trials run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flywheel.ir import ScheduleConfig
from flywheel.measure.contest import Contest
from flywheel.measure.environment import Environment
from flywheel.search.trials.evaluate import Prepared


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
