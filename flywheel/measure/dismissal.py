"""Decides when programs that are timed alternately need no more samples: one is surely slower, or surely the
fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Final

from flywheel.measure.outcome import Rounds

HOPELESS: Final = 3.0
"""Sampling ends if a program's first sample takes this many times its rival's."""

@dataclass(frozen=True, slots=True)
class DismissalRule:
    """A rule that applies after some samples: a program is dismissed if at least `behind` of its samples each exceed
    the rival's sample beside them by more than `margin`, a fraction of the rival's median."""

    behind: int
    margin: float


STAGES: Final = MappingProxyType(
    {
        1: DismissalRule(1, HOPELESS - 1.0),
        5: DismissalRule(5, 0.01),
        8: DismissalRule(8, 0.004),
        12: DismissalRule(11, 0.003),
        16: DismissalRule(15, 0.0025),
        20: DismissalRule(18, 0.002),
    }
)
"""The stages at which a program can be dismissed, by samples so far.

Without margins, a program as fast as its rival is dismissed with probability at most 3.3 % over all stages after the
first, whatever the noise of independent pairs. The margins lower it: of 628 pairs of one program's recorded
samples from two of its loads, none was dismissed. Where one was made slower, one pair was at 0.1 %, 58 % were at 0.5 %,
92 % at 1 % and 99 % at 2 % (tests/measure/test_dismissal.py).
"""


def is_dismissed(program_us: Sequence[float], rival_us: Sequence[float]) -> bool:
    """Whether a program is surely slower than its rival. Both have the same number of samples, taken alternately.

    False if STAGES has no rule for this number: sampling goes on.
    """
    stage = STAGES.get(len(program_us))
    if stage is None:
        return False
    least_us = stage.margin * median(rival_us)
    return sum(ours - theirs > least_us for ours, theirs in zip(program_us, rival_us, strict=True)) >= stage.behind


SETTLED: Final = MappingProxyType({4: 0.003, 6: 0.002, 8: 0.001})
"""Rounds so far -> a margin, as a fraction of the fastest program's median. A final ends if every other program is
slower than the fastest by more than the margin in every round, compared by the median difference of that round.

Whatever the noise, two equal programs meet this with probability at most 2**-n in n rounds. The margins lower it, since
there are several others and the fastest is chosen after the fact (experiments/aa_noise.py).
"""


def is_settled(times_us: Sequence[Rounds]) -> bool:
    """Whether one of several programs is surely the fastest. All have the same number of rounds, taken alternately.

    False if SETTLED has no margin for this number: the final goes on.
    """
    margin = SETTLED.get(len(times_us[0]))
    if margin is None:
        return False
    medians = [median(us for samples in rounds for us in samples) for rounds in times_us]
    fastest = medians.index(min(medians))
    least_us = margin * medians[fastest]
    return all(
        median(ours - least for ours, least in zip(*pair, strict=True)) > least_us
        for place, rounds in enumerate(times_us)
        if place != fastest
        for pair in zip(rounds, times_us[fastest], strict=True)
    )
