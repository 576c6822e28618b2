"""The next event, in preallocated arrays: a heap of timers, and a tree that finds the first arrival.

Compiled code that allocates nothing also counts no references, which halves its time. numba caches the compiled
`events.run`, which contains this file's code, and recompiles it only when the text of events.py changes. So edit
events.py whenever you edit this file's code.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.compiled import bare

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER: Final = -1.0
"""Stands for no arrival, in place of a volume."""

_FAR: Final = np.inf


class Agenda(NamedTuple):
    """Timers by time, in order of setting for equal times; and at most one arrival per SM.

    Timer k of the heap is `times[k]` and `marks[k]` = (its number, who is due). `sizes` has the current number of
    timers and the number ever set. `volumes` and `firsts` are a tree whose second half has one leaf per SM. Each inner
    node has the first arrival of its two children and its SM; node 1 has the first of all.
    """

    times: Floats
    marks: Ints
    sizes: Ints
    volumes: Floats
    firsts: Ints


def empty_agenda(n_sms: int, n_timers: int) -> Agenda:
    """An empty agenda with room for `n_timers` timers at once."""
    size = 1
    while size < n_sms:
        size *= 2
    firsts = np.zeros(2 * size, np.int64)
    firsts[size:] = np.arange(size)
    level = size
    while level > 1:
        firsts[level >> 1 : level] = firsts[level : 2 * level : 2]
        level >>= 1
    room = np.zeros(n_timers), np.zeros((n_timers, 2), np.int64), np.zeros(2, np.int64)
    return Agenda(*room, np.full(2 * size, _FAR), firsts)


@bare
def arrive_at(agenda: Any, number: int, volume: float) -> None:
    """Set an SM's arrival to `volume`; NEVER removes it."""
    volumes, firsts = agenda.volumes, agenda.firsts
    first, least = number, volume if volume != NEVER else _FAR
    place = (len(volumes) >> 1) + number
    while volumes[place] != least or firsts[place] != first:
        volumes[place] = least
        firsts[place] = first
        if place == 1:
            return
        other = volumes[place ^ 1]
        if other < least or (other == least and place & 1):  # of equal ones, the left one
            least = other
            first = firsts[place ^ 1]
        place >>= 1


@bare
def arrives(agenda: Any) -> bool:
    """Whether there is an arrival."""
    return bool(agenda.volumes[1] != _FAR)


@bare
def set_timer(agenda: Any, time: float, who: int) -> None:
    """Set a timer: `who` is due at `time`."""
    times, marks, sizes = agenda.times, agenda.marks, agenda.sizes
    place = sizes[0]
    while place:
        above = (place - 1) >> 1
        if times[above] <= time:
            break
        times[place] = times[above]
        marks[place, 0] = marks[above, 0]
        marks[place, 1] = marks[above, 1]
        place = above
    times[place] = time
    marks[place, 0] = sizes[1]
    marks[place, 1] = who
    sizes[0] += 1
    sizes[1] += 1


@bare
def take_timer(agenda: Any) -> int:
    """Remove the first timer and return who is due."""
    times, marks, sizes = agenda.times, agenda.marks, agenda.sizes
    who = marks[0, 1]
    sizes[0] -= 1
    last = sizes[0]
    time, number = times[last], marks[last, 0]
    place = 0
    while 2 * place + 1 < last:
        below = 2 * place + 1
        if below + 1 < last and _is_before(times, marks, below + 1, times[below], marks[below, 0]):
            below += 1
        if not _is_before(times, marks, below, time, number):
            break
        times[place] = times[below]
        marks[place, 0] = marks[below, 0]
        marks[place, 1] = marks[below, 1]
        place = below
    mover = marks[last, 1]
    times[place] = time
    marks[place, 0] = number
    marks[place, 1] = mover
    return int(who)


@bare
def _is_before(times: Floats, marks: Ints, place: int, time: float, number: int) -> bool:
    return bool(times[place] < time or (times[place] == time and marks[place, 0] < number))
