"""Running totals of a campaign's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from flywheel.measure.latency import RESOLUTION
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, best_so_far, trials_of


class Tally:
    """The rows of a campaign, which is `measured` or predicted: those that are known, then one after the other.

    `next` is the number behind the last row; `trials` counts those that are trials, `outcomes` by outcome, and `stale`
    those behind the last gain: the first one of the best program, and of predicted ones the last that was better by
    more than predictions can tell apart (RESOLUTION). `tried` are config ids, but for those that found no memory:
    another run may find it.
    """

    def __init__(self, known: Sequence[TrialRecord], measured: bool) -> None:
        self._measured: Final = measured
        self.next = 1 + max((record.trial for record in known), default=-1)  # imported trials may leave gaps
        self.best = best_of(known)
        trials = trials_of(known)
        self.trials = len(trials)
        self.outcomes = Counter(record.outcome for record in trials)
        self._gain_us: float | None = None  # the predicted latency at the last gain
        self.stale = self._stale(trials)
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
        self.stale = 0 if improved and self._tells(record) else self.stale + 1
        return improved

    def _stale(self, trials: Sequence[TrialRecord]) -> int:
        """The number of trials behind the last gain."""
        best = self.best
        if best is None:
            return len(trials)
        gained = [record.trial for record in trials if record.program_id == best.program_id][:1]
        if not self._measured:
            bests = (record for record, found in best_so_far(trials) if found.get("predicted") is record)
            gained = [record.trial for record in bests if self._tells(record)][-1:]
        return sum(record.trial > max(gained, default=-1) for record in trials)

    def _tells(self, record: TrialRecord) -> bool:
        """Whether a new best is a gain, and not nearer to the last gain than predictions are exact."""
        if self._measured or record.predicted_us is None:
            return True
        told = self._gain_us is None or record.predicted_us < self._gain_us * (1.0 - RESOLUTION)
        self._gain_us = record.predicted_us if told else self._gain_us
        return told


def is_unmeasured(record: TrialRecord, measured: bool) -> bool:
    """Whether a row of a `measured` campaign says that its measurement was not worth the time. Such a row says nothing
    about the latency that a measurement would have found."""
    return record.is_predicted and measured


def _rank(record: TrialRecord) -> tuple[bool, bool, bool, float, int]:
    objective = record.objective_us
    return (objective is None, record.kind == "imported", record.is_doubtful, objective or 0.0, record.trial)
