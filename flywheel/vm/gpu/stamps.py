"""The times that a traced launch stamps, from cycles of each SM's clock to one timer of the GPU.

An SM's clock is exact over a task, but its rate is not even: for some tenths of a millisecond, neighbouring SMs may run
2 % faster than on average (results/gpu/two_h100/clocks.txt). All SMs share the timer, which counts in steps of 32 ns or
more. So a stamp is a time of the SM's clock, corrected by readings of the timer at many tasks.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.vm.abi import Anchor, Stamp

Times = npt.NDArray[np.uint64]
Sms = npt.NDArray[np.integer[Any]]

_WINDOW_NS: Final = 20_000
"""Time over which readings of the timer are averaged: many ticks, and short beside changes of a clock's rate."""

_SLOWEST_TICK_NS: Final = 1_024
"""No GPU is known to tick slower. A few readings may have a larger divisor by chance."""


def stamps_ns(stamps: Times, timers: Times, anchors: Times, sms: Sms) -> Times:
    """Stamps [instruction, Stamp] in ns of the global timer, from stamps in cycles of each SM's clock; 0 stays 0.

    `timers` is the timer at each instruction's stamp CURRENT. `anchors` are [SM, Anchor], zero for an SM that has not
    run a launch yet. `sms` is the SM of each instruction, whose instructions stand in the order of their stamps.
    """
    found, middle = even_ns(stamps, anchors, sms), _tick_ns(timers, anchors) // 2
    for sm in np.unique(sms):
        rows = np.flatnonzero((sms == sm) & (stamps[:, Stamp.CURRENT] > 0))
        begin, end = anchors[sm, [Anchor.FIRST_NS, Anchor.LAST_NS]].astype(np.int64)
        starts = found[rows, Stamp.CURRENT] - begin
        late = timers[rows].astype(np.int64) + middle - begin - starts
        found[rows] += _late(starts, late, int(end - begin), found[rows] - begin)
    return np.where(stamps == 0, 0, found).astype(np.uint64)


def even_ns(stamps: Times, anchors: Times, sms: Sms) -> npt.NDArray[np.int64]:
    """Stamps [instruction, Stamp] in ns as above, as if the rate of each SM's clock were even between its anchors.

    What it makes of a stamp 0 has no meaning.
    """
    ties = (Anchor.FIRST_NS, Anchor.FIRST_CYCLES, Anchor.LAST_NS, Anchor.LAST_CYCLES)
    first_ns, first, last_ns, last = (anchors[:, each].astype(np.int64)[sms, None] for each in ties)
    ns_per_cycle = (last_ns - first_ns) / np.maximum(last - first, 1)
    # Integers: the timer counts from 1970, and a float64 of that size cannot hold single nanoseconds.
    found: npt.NDArray[np.int64] = np.rint((stamps.astype(np.int64) - first) * ns_per_cycle).astype(np.int64)
    return first_ns + found


def _tick_ns(timers: Times, anchors: Times) -> int:
    """The time in ns between two ticks of the timer: what divides the time between any two of its readings."""
    read = np.concatenate([timers, anchors[:, [Anchor.FIRST_NS, Anchor.LAST_NS]].ravel()])
    return min(int(np.gcd.reduce(np.diff(np.unique(read[read > 0])))), _SLOWEST_TICK_NS)


def _late(
    starts: npt.NDArray[np.int64], late: npt.NDArray[np.int64], span: int, at: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """What the timer is ahead of an SM's clock at the times `at`. All times are in ns since the SM's first anchor.

    By readings of the timer, it is ahead by `late` at `starts`; at 0 and `span`, where ticks set the clock, by nothing.
    Readings near those two are left out.
    """
    inside = (starts >= _WINDOW_NS) & (starts <= span - _WINDOW_NS)
    knots, values = [0.0], [0.0]
    begin = 0
    starts, late = starts[inside], late[inside]
    while begin < len(starts):
        end = int(np.searchsorted(starts, starts[begin] + _WINDOW_NS))
        knots.append(float(starts[begin:end].mean()))
        values.append(float(late[begin:end].mean()))
        begin = end
    return np.rint(np.interp(at, [*knots, float(span)], [*values, 0.0])).astype(np.int64)
