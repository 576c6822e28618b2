"""Programs that were launched in turn on one GPU, so that whatever slows the GPU down slows all of them."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.measure.outcome import TrialOutcome

Rounds = tuple[tuple[float, ...], ...]
"""Times of one program in us, by round and sample; a round begins with loading the program anew."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What came of a program, and of the rivals that it was measured against, if any.

    `times_us` holds the candidate's samples, then each rival's; sample i of a round was taken right beside sample i of
    the others. It is empty where nothing was compared: no rival, or a candidate without a latency.
    """

    outcome: TrialOutcome
    rivals: tuple[TrialOutcome, ...] = ()
    times_us: tuple[Rounds, ...] = ()
