"""What a fleet asks of a place where trials run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flywheel.ir import ScheduleConfig
from flywheel.measure.contest import Contest
from flywheel.measure.environment import Environment
from flywheel.search.trials.evaluate import Prepared


class Host(Protocol):
    """A station elsewhere, which may die: each method but `end` then raises WorkerDiedError, and `start` begins anew.

    `prepare` and `measure` may be called side by side. What else they raise is what the station raised.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def start(self) -> Environment:
        """Return with a fresh station that is ready, whatever became of the one before; where that is."""
        ...

    def prepare(self, config: ScheduleConfig) -> Prepared:
        """As `Station.prepare`."""
        ...

    def measure(self, config: ScheduleConfig, rivals: Sequence[ScheduleConfig], rounds: int) -> tuple[Contest, float]:
        """As `Station.measure`."""
        ...

    def end(self, now: bool) -> None:
        """End the station, with `now` whatever it is doing."""
        ...
