"""Whether buffers may share pages in a program whose layers are alike, decided in the same program of few layers.

Source: docs/ir.md, "Proof by layers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from flywheel.ir.layers import Layers
from flywheel.ir.records import PageAllocation
from flywheel.ir.runs import Run, Runs
from flywheel.ir.validate.memory import Lives
from flywheel.ir.validate.races import Accesses


def pages_pass_on(pages: PageAllocation, runs: Runs, layers: Layers, brief: int, accesses: Accesses) -> bool:
    """Whether each buffer of a page is written once all that use the one before it are done.

    False also where two that follow each other are too far apart to be seen in the program with the template `brief`
    times, whose accesses those are. `layers` are local.
    """
    places = _first_writes(runs.spelled)
    parts = _Parts(layers, brief)
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
    """Number of the first run that writes each buffer, of those with the template once."""
    places: dict[int, int] = {}
    for number, run in enumerate(runs):
        for buffer in run.outputs:
            places.setdefault(buffer, number)
    return places


class _Part(NamedTuple):
    """Where a buffer is: in what comes before the templates (0), in template `number`, or behind them; and by how many
    templates it is moved."""

    number: int
    before: int


@dataclass(frozen=True, slots=True)
class _Parts:
    layers: Layers
    brief: int

    def of(self, buffer: int) -> _Part:
        """The part that has a buffer of the program of all layers."""
        span, times = self.layers.buffers, self.layers.times
        if buffer < span.start:
            return _Part(0, 0)
        place = min((buffer - span.start) // span.size if span.size else times, times)
        return _Part(place + 1, min(place, times - 1))

    def seen(self, one: int, other: int) -> tuple[int, int] | None:
        """Two buffers, the one written first, as they stand to each other in the brief program; None where none do.

        Two of templates, neither of them the last, stand as two as far apart do; and to the last one, and to what is
        behind it, as many templates before it.
        """
        times, size = self.layers.times, self.layers.buffers.size
        first, second = self.of(one).number, self.of(other).number
        if second >= times:  # from the end
            back = times - self.brief
            return (one - back * size, other - back * size) if first - back > 0 or not back else None
        if first == 0:
            return (one, other) if second < self.brief else None
        back = first - 1
        return (one - back * size, other - back * size) if second - back < self.brief else None
