"""When a program that is timed in turn with a rival needs no more samples, because it is surely slower."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from types import MappingProxyType
from typing import Final

HOPELESS: Final = 3.0
"""Times its rival's that a program's first sample takes, after which it is timed no further."""

MARGINS: Final = MappingProxyType({1: HOPELESS - 1.0, 5: 0.01, 10: 0.004})
"""Of the rival's median, by samples so far: what every sample of a dismissed program takes more than the rival's beside
it.

A program as fast as its rival has no margin behind any of n independent pairs with a chance of at most 2**-n, whatever
the noise: 3.3 % for 5 or 10. The margins make less of it: of 6,200 pairs of one program's recorded samples from two of
its loads, none was dismissed, and 91 % where one was made 2 % slower (tests/measure/test_dismissal.py).
"""


def is_dismissed(program_us: Sequence[float], rival_us: Sequence[float]) -> bool:
    """Whether a program is surely slower than its rival, by as many samples of each, taken side by side.

    False where MARGINS says nothing of so many: sampling goes on.
    """
    margin = MARGINS.get(len(program_us))
    if margin is None:
        return False
    least_us = margin * median(rival_us)
    return all(ours - theirs > least_us for ours, theirs in zip(program_us, rival_us, strict=True))
