"""Running totals of a campaign's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, trials_of


class Tally:
    """The rows of a campaign, which is `measured` or predicted: those that are known, then one after the other.

    `next` is the number behind the last row; `trials` counts those that are trials, `outcomes` by outcome, and `stale`
    those behind the first one of the best program. `tried` are config ids, but for those that found no memory: another
    run may find it.
    """

    def __init__(self, known: Sequence[TrialRecord], measured: bool) -> None:
        self._measured: Final = measured
        self.next = 1 + max((record.trial for record in known), default=-1)  # imported trials may leave gaps
        self.best = best_of(known)
        trials = trials_of(known)
        self.trials = len(trials)
        self.outcomes = Counter(record.outcome for record in trials)
        found = [record.trial for record in trials if self.best and record.program_id == self.best.program_id]
        last = min(found, default=-1)
        self.stale = sum(record.trial > last for record in trials)
        self.tried = {record.config_id for record in trials if record.outcome != "no_memory"}
        self._programs = {record.program_id for record in trials}

    def count(self, record: TrialRecord) -> bool:
        """Count the row of a new trial. Returns whether it is the best so far."""
        self.tried.add(record.config_id)
        self.next = record.trial + 1
        self.trials += 1
        self.outcomes[record.outcome] += 1
        repeated = record.source == "store" and record.program_id in self._programs
        self._programs.add(record.program_id)
        worth = record.may_be_best and not is_unmeasured(record, self._measured)
        improved = worth and not repeated and (self.best is None or _rank(record) < _rank(self.best))
        if improved:
            self.best = record
        self.stale = 0 if improved else self.stale + 1
        return improved


def is_unmeasured(record: TrialRecord, measured: bool) -> bool:
    """Whether a row of a `measured` campaign says that its measurement was not worth the time. Such a row says nothing
    about the latency that a measurement would have found."""
    return record.is_predicted and measured


def _rank(record: TrialRecord) -> tuple[bool, bool, bool, float, int]:
    objective = record.objective_us
    return (objective is None, record.kind == "imported", record.is_doubtful, objective or 0.0, record.trial)
