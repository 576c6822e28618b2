"""The end of a measured campaign: its best programs once more, in turn on one GPU, and whether one is the best."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from flywheel.measure.contest import Contest
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import standing
from flywheel.search.noise import Gain, gain

FINALISTS: Final = 5
ROUNDS: Final = 12
"""Times that all of them are loaded anew and timed."""


def finalists(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The fastest FINALISTS programs, each by its fastest row; none where fewer than two were measured, or where these
    have had their final."""
    fastest: dict[str | None, TrialRecord] = {}
    for record in sorted(standing(records), key=lambda record: (record.objective_us or 0.0, record.trial)):
        if record.outcome == "measured":
            fastest.setdefault(record.program_id, record)
    chosen = list(fastest.values())[:FINALISTS]
    settled = all(record.source == "final" for record in chosen)
    return [] if len(chosen) < 2 or settled else chosen


def gains(contest: Contest, seed: int) -> list[Gain]:
    """How each program of a contest stands against the fastest of the others."""
    medians = [median(us for samples in rounds for us in samples) for rounds in contest.times_us]
    order = sorted(range(len(medians)), key=medians.__getitem__)
    rivals = [order[1] if place == order[0] else order[0] for place in range(len(medians))]
    return [gain(rounds, contest.times_us[rival], seed) for rounds, rival in zip(contest.times_us, rivals, strict=True)]
