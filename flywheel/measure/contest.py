"""Programs that were launched alternately on one GPU, so that a slow GPU slows all of them."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.measure.outcome import TrialOutcome

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
