"""The times that a traced launch stamps, from cycles of each SM's clock to one timer of the GPU.

An SM's clock is exact over a task, but its rate is not even: for some tenths of a millisecond, neighbouring SMs may run
2 % faster than on average (results/gpu/h100/clocks.txt). All SMs share the timer, which counts in steps of 32 ns or
more. So a stamp is a time of the SM's clock, corrected by readings of the timer at many tasks.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.vm.trace_abi import Anchor, Stamp

Times = npt.NDArray[np.uint64]
Sms = npt.NDArray[np.integer[Any]]

_WINDOW_NS: Final = 20_000
"""Time over which readings of the timer are averaged: many ticks, and short beside changes of a clock's rate."""


def stamps_ns(stamps: Times, timers: Times, anchors: Times, sms: Sms) -> Times:
    """Stamps [instruction, Stamp] in ns of the global timer, from stamps in cycles of each SM's clock; 0 stays 0.

    `timers` is the timer at each instruction's stamp CURRENT. `anchors` are [SM, Anchor], zero for an SM that has not
    run a launch yet. `sms` is the SM of each instruction, whose instructions stand in the order of their stamps.
    """
    found, middle = even_ns(stamps, anchors, sms), _tick_ns(timers) // 2
    for sm in np.unique(sms):
        rows = np.flatnonzero((sms == sm) & (stamps[:, Stamp.CURRENT] > 0))
        begin, end = anchors[sm, [Anchor.FIRST_NS, Anchor.LAST_NS]].astype(np.int64)
        starts = found[rows, Stamp.CURRENT] - begin
        late = timers[rows].astype(np.int64) + middle - begin - starts
        found[rows] += _late(starts, late, int(end - begin), found[rows] - begin)
    return np.where(stamps == 0, 0, found).astype(np.uint64)


def even_ns(stamps: Times, anchors: Times, sms: Sms) -> npt.NDArray[np.int64]:
    """The same as if the rate of each SM's clock were even between its anchors. Of a stamp 0 it makes some number."""
    ties = (Anchor.FIRST_NS, Anchor.FIRST_CYCLES, Anchor.LAST_NS, Anchor.LAST_CYCLES)
    first_ns, first, last_ns, last = (anchors[:, each].astype(np.int64)[sms, None] for each in ties)
    ns_per_cycle = (last_ns - first_ns) / np.maximum(last - first, 1)
    # Integers: the timer counts from 1970, and a float64 of that size cannot hold single nanoseconds.
    found: npt.NDArray[np.int64] = np.rint((stamps.astype(np.int64) - first) * ns_per_cycle).astype(np.int64)
    return first_ns + found


def _tick_ns(timers: Times) -> int:
    """The time between two ticks of the timer: what divides the time between any two readings."""
    return int(np.gcd.reduce(np.diff(np.unique(timers[timers > 0]))))


def _late(
    starts: npt.NDArray[np.int64], late: npt.NDArray[np.int64], span: int, at: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """What the timer is ahead of an SM's clock at the times `at`.

    It is `late` at `starts`, by readings of the timer, and nothing at 0 and `span`, where the clock was set by ticks.
    Readings near those two add nothing.
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
