"""Whether buffers may share pages in a program of alike layers, decided in the same program with few layers.

Source: docs/ir.md, "Proof by layers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from flywheel.ir.compressed import Brief, Layers, Run
from flywheel.ir.records import PageAllocation
from flywheel.ir.validate.memory import Lives
from flywheel.ir.validate.races import Accesses


def pages_pass_on(pages: PageAllocation, brief: Brief, times: int, accesses: Accesses) -> bool:
    """Whether each buffer of a page is written only after all uses of the one before it are done.

    The decision is made in the program with the template `times` times, whose accesses are given. It is also False
    where two consecutive buffers are too far apart for that program. The layers must be local.
    """
    layers = brief.layers
    places = _first_writes(brief.runs)
    parts = _PageParts(layers, times)
    members: dict[int, list[tuple[int, int]]] = {}
    n_runs, n_buffers = layers.runs.size, layers.buffers.size
    for number, page in pages.buffer_to_page.items():
        part = parts.of(number)
        first = places.get(number - part.before * n_buffers)
        if first is not None:
            members.setdefault(page, []).append((first + part.before * n_runs, number))
    pairs = {
        parts.seen(one, other) for written in members.values() for (_, one), (_, other) in pairwise(sorted(written))
    }
    if None in pairs:
        return False
    near = sorted(pair for pair in pairs if pair is not None)
    lives = Lives(accesses, {number for pair in near for number in pair})
    return all(lives.pass_on(one, other) for one, other in near)


def _first_writes(runs: Sequence[Run]) -> dict[int, int]:
    """Buffer -> the number of the first run that writes it, among the runs with the template once."""
    places: dict[int, int] = {}
    for number, run in enumerate(runs):
        for buffer in run.outputs:
            places.setdefault(buffer, number)
    return places


class _PagePart(NamedTuple):
    """The place of a buffer: in the prologue (0), in template `number`, or in the epilogue; and the number of templates
    by which it is moved."""

    number: int
    before: int


@dataclass(frozen=True, slots=True)
class _PageParts:
    layers: Layers
    brief: int

    def of(self, buffer: int) -> _PagePart:
        """The part that has this buffer of the program of all layers."""
        span, times = self.layers.buffers, self.layers.times
        if buffer < span.start:
            return _PagePart(0, 0)
        place = min((buffer - span.start) // span.size if span.size else times, times)
        return _PagePart(place + 1, min(place, times - 1))

    def seen(self, one: int, other: int) -> tuple[int, int] | None:
        """A pair of buffers of the brief program that have the same order as these; None where there is none. `one` is
        written first.

        Two buffers of templates, neither of them the last, have the same order as two buffers as far apart. A buffer of
        the last template or the epilogue has with an earlier template the same order as with one as many templates
        before the end.
        """
        times, size = self.layers.times, self.layers.buffers.size
        first, second = self.of(one).number, self.of(other).number
        if second >= times:  # counted from the end
            back = times - self.brief
            return (one - back * size, other - back * size) if first - back > 0 or not back else None
        if first == 0:
            return (one, other) if second < self.brief else None
        back = first - 1
        return (one - back * size, other - back * size) if second - back < self.brief else None
