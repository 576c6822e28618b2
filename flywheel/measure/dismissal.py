"""Decides when programs that are timed alternately need no more samples: one is surely slower, or surely the
fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Final

from flywheel.measure.contest import Rounds

HOPELESS: Final = 3.0
"""Sampling ends if a program's first sample takes this many times its rival's."""

@dataclass(frozen=True, slots=True)
class Stage:
    """After some samples: a program is dismissed where at least `behind` of them each take more than their rival's
    beside them by more than `margin`, a fraction of the rival's median."""

    behind: int
    margin: float


STAGES: Final = MappingProxyType(
    {
        1: Stage(1, HOPELESS - 1.0),
        5: Stage(5, 0.01),
        8: Stage(8, 0.004),
        12: Stage(11, 0.003),
        16: Stage(15, 0.0025),
        20: Stage(18, 0.002),
    }
)
"""The stages at which a program can be dismissed, by samples so far.

Without margins, a program as fast as its rival is dismissed with probability at most 3.3 % over all stages after the
first, whatever the noise of independent pairs. The margins lower it: of 620 pairs of one program's recorded
samples from two of its loads, none was dismissed. Where one was made slower, 47 % were at 0.5 %, 85 % at 1 % and 95 %
at 2 % (tests/measure/test_dismissal.py).
"""


def is_dismissed(program_us: Sequence[float], rival_us: Sequence[float]) -> bool:
    """Whether a program is surely slower than its rival, by as many samples of each, taken side by side.

    False where STAGES says nothing of so many: sampling goes on.
    """
    stage = STAGES.get(len(program_us))
    if stage is None:
        return False
    least_us = stage.margin * median(rival_us)
    return sum(ours - theirs > least_us for ours, theirs in zip(program_us, rival_us, strict=True)) >= stage.behind


SETTLED: Final = MappingProxyType({4: 0.003, 6: 0.002, 8: 0.001})
"""Of the fastest program's median, by rounds so far: what every other takes more than it in every round, in the median
of that round, where a final needs no more of them.

Whatever the noise, two programs that are alike fall so with a chance of at most 2**-n in n rounds; the margins make
less of it, since there are several others and the fastest is chosen after the fact (experiments/aa_noise.py).
"""


def is_settled(times_us: Sequence[Rounds]) -> bool:
    """Whether one of several programs is surely the fastest, by as many rounds of each, taken in turn.

    False where SETTLED says nothing of so many: the final goes on.
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
