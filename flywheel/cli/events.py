"""A search as JSON lines on stdout, one event a line, as it happens. docs/reference.md lists the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from flywheel.cli.progress import Reporter
from flywheel.cli.text import show_json
from flywheel.measure.record import TrialRecord

if TYPE_CHECKING:
    from flywheel.search.campaign import Progress
    from flywheel.search.run import Start

EVENTS_VERSION: Final = 1
"""The number rises when an older reader would misread the lines. An added field leaves it."""

_SEARCHED: Final = ("model", "gpu", "dtype", "weights", "context", "batch", "sampler", "seed", "measure")
_STARTS: Final = ("model", "gpu", "dtype", "weights", "context", "campaign", "trial", "distance")
_BUDGETS: Final = ("trials", "time_s", "until", "patience")
_TRIAL: Final = ("trial", "outcome", "reason", "source", "config_id", "program_id", "latency_us", "predicted_us",
                 "predictor", "floor_us", "floor_fraction", "tasks")  # fmt: skip


class JsonLines:
    """Writes the events `start`, `trial`, `final` and `best` to stdout, and shows them on stderr by `reporter`."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def __enter__(self) -> Self:
        self._reporter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reporter.__exit__(kind, error, trace)

    def start(self, start: Start) -> None:
        """Write the start event: what is searched, and the trials that there are already."""
        from flywheel.search.knowledge.known import known_document

        spec, before = start.spec, start.best_known
        show_event(
            "start",
            {
                "version": EVENTS_VERSION,
                "campaign": start.name,
                **{name: getattr(spec, name) for name in _SEARCHED},
                "predictor": start.predictor if spec.measure == "predict" else None,
                "known": start.known,
                "dimensions": start.dimensions,
                "configurations": start.configurations,
                "best_known": None if before is None else known_document(before, spec.batch),
                "starts": [{name: getattr(warm, name) for name in _STARTS} for warm in start.starts],
                "budget": {name: getattr(spec, name) for name in _BUDGETS},
            },
        )
        self._reporter.start(start)

    def watch(self, progress: Progress) -> None:
        """Write the event of a trial that ended or a final that was measured, and `best` where it is a new best."""
        fields = {**_trial(progress.record), "trials": progress.trials, "elapsed_s": progress.elapsed_s}
        show_event("final" if progress.record.source == "final" else "trial", fields)
        if progress.improved:
            show_event("best", fields)
        self._reporter.watch(progress)

    def drain(self) -> None:
        """Tell the reporter. The end event will say that the search was interrupted."""
        self._reporter.drain()

    def abort(self) -> None:
        """Tell the reporter. An aborted search has no end event."""
        self._reporter.abort()


def show_event(event: str, fields: Mapping[str, Any]) -> None:
    """Write one event to stdout."""
    show_json({"event": event, **fields}, indent=None)


def _trial(record: TrialRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _TRIAL} | {"config": json.loads(record.config)}
