"""Descent from many starts, one knob at a time. Latencies may arrive long after their points were asked for.

A descent takes any better value of a knob, and ends where no knob has one. The next descent begins at a good end with
one knob changed (a detour), at one with a few knobs changed (a kick), between two of them (a crossing), or again at one
of the first points. The knobs that a detour or a kick changed stay fixed until the other knobs have adapted: where
several knobs must change together, no single change is an improvement. The descent learns which values are not worth a
try.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Final

import numpy as np

from flywheel.search.sampling.contrasts import Contrasts
from flywheel.search.sampling.gaussian import Grid, Point, untried

_ENDS: Final = 12
"""Best ends of descents that are kept as bases for the next. Their latencies all differ, since equal latencies mostly
mean the same program."""

_DETOURS: Final = 0.6
"""Share of descents that begin with a detour, while new detours are left."""

_SPREAD: Final = 0.006
"""Mean of the random amount that is added to each detour's loss, as a fraction of the best latency. The detour with the
least sum comes next."""

_REPEAT: Final = 0.006
"""Penalty for each earlier detour to the same value of the knob, from any end, as a fraction of the best latency."""

_UNKNOWN: Final = 0.03
"""Assumed loss of a detour to a point of unknown latency, as a fraction of its base's latency."""

_FAR: Final = 0.1
"""Most that a detour or a kick may lose, as a fraction of the best latency."""

_BEST: Final = 0.6
"""Share of kicks that start at the best end; the others start at any end."""

_CROSSED: Final = 0.3
"""Share of descents that begin between two ends."""

_AFRESH: Final = 0.2
"""Share of descents that begin again at one of the first points: in another order of knobs they end elsewhere."""

_FIRST: Final = 3
"""Number of those first points."""

_KICK: Final = (2, 4)
"""(least, most) knobs that a kick changes."""

_LOST: Final = (0.01, 0.03)
"""A value that each time lost more than this fraction of the latency seems not worth a try. The second number holds
while knobs are fixed and for kicks: beside rare values of other knobs such a value may gain."""

_AGAIN: Final = 0.05
"""Share of values that are tried although they seem not worth a try."""

_STARTS: Final = 100
"""Starts in a row without an untried point, after which `ask` walks the rest of the grid, which is then small."""


class Descent:
    """Gives points to try, and learns their latencies in us, None where infeasible, in any order.

    It gives no point twice. Which point it gives depends on all earlier calls and on the `chance` that it gets.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._values: dict[Point, float] = {}
        self._asked: set[Point] = set()
        self._ends: list[Point] = []
        self._given: tuple[Point, ...] = ()
        self._centre: Point | None = None
        self._begun: dict[Point, int | None] = {}  # points of this descent, and the knob that each varies
        self._left: list[int] = []  # knobs that this round has yet to vary
        self._moved = True  # whether the centre moved since the round began
        self._held: frozenset[int] = frozenset()  # knobs that stay until no other has a better value
        self._waiting: list[tuple[Point, int]] = []
        self._gains = np.ones(len(grid.sizes))
        self._detours: set[tuple[Point, Point]] = set()  # from where to where
        self._turns: Counter[tuple[int, int]] = Counter()  # detours by knob and value
        self._contrasts = Contrasts(grid)

    @property
    def values(self) -> dict[Point, float]:
        """The latencies that it knows, in us; an infeasible point's is infinite."""
        return self._values

    def fork(self) -> Descent:
        """A copy to ask without a change to this one. Both share the latencies that either is told."""
        fork = copy(self)
        fork._asked, fork._begun = set(self._asked), dict(self._begun)
        fork._ends, fork._left, fork._waiting = list(self._ends), list(self._left), list(self._waiting)
        fork._gains, fork._detours, fork._turns = self._gains.copy(), set(self._detours), self._turns.copy()
        return fork

    def note(self, point: Point) -> None:
        """Count a point as under way. The descent moves to it if it proves better, even if it never asked for it."""
        if point not in self._asked:
            self._asked.add(point)
            self._begun[point] = None
            self._given = (*self._given, point)[:_FIRST]

    def tell(self, point: Point, value: float | None) -> None:
        """Take in a point's latency in us, None where it is infeasible."""
        self.note(point)
        worth = self._values[point] = float("inf") if value is None else value
        self._contrasts.add(point, self._values)
        if point in self._begun and self._centre is not None and worth < self._worth(self._centre):
            self._move(point, self._begun[point])

    def ask(self, chance: np.random.Generator) -> Point:
        """The next point to try, which it did not give before; the best end where none is left."""
        if self._centre is None and self._begun:
            given = list(self._begun)[::-1]
            self._begin(min(given, key=self._worth))
            self._begun |= dict.fromkeys(given)
        for _ in range(_STARTS):
            found = self._descend(chance)
            if found is not None:
                self._asked.add(found)
                return found
            start, held = self._start(chance)
            self._begin(start, held)
            self._given = self._given or (start,)
            if start not in self._asked:
                self._asked.add(start)
                return start
        found = untried(self._grid, self._ends[0], self._asked)
        self._asked.add(found)
        return found

    def _descend(self, chance: np.random.Generator) -> Point | None:
        """The next point beside the centre; None where this descent has ended."""
        while self._centre is not None and not self._is_lost(self._centre):
            while self._waiting:
                point, knob = self._waiting.pop(0)
                if point not in self._asked:
                    self._begun[point] = knob
                    return point
            if not self._left:
                if not self._moved:
                    if not self._held:
                        return None
                    self._ends, self._held = self._best([*self._ends, self._centre]), frozenset()
                order = np.argsort(-self._gains * chance.random(len(self._gains)), kind="stable")
                self._left = [int(knob) for knob in order if int(knob) not in self._held]
                self._moved = False
            if self._left:
                self._look(self._left.pop(0), chance)
        return None

    def _is_lost(self, centre: Point) -> bool:
        """Whether a detour or a kick lost more than the other knobs are likely to win back."""
        return bool(self._held) and float("inf") > self._worth(centre) > (1.0 + _FAR) * self._worth(self._ends[0])

    def _look(self, knob: int, chance: np.random.Generator) -> None:
        """Move to the best value of a knob that is known to be better; without one, queue its values, nearest first."""
        assert self._centre is not None
        centre = self._centre
        beside = sorted(self._grid.beside(centre, knob), key=lambda point: abs(point[knob] - centre[knob]))
        known = [point for point in beside if self._worth(point) < self._worth(centre)]
        if known:
            self._move(min(known, key=self._worth), knob)
            return
        self._gains[knob] = max(0.8 * self._gains[knob], 0.2)
        lost = _LOST[bool(self._held)]
        self._waiting = [
            (point, knob)
            for point in beside
            if point not in self._asked
            and not (self._contrasts.is_vain(knob, centre[knob], point[knob], lost) and chance.random() > _AGAIN)
        ]

    def _move(self, point: Point, knob: int | None) -> None:
        if knob is not None:
            self._gains[knob] += 0.75
        self._waiting = [(other, one) for other, one in self._waiting if one == knob]
        self._centre, self._moved = point, True

    def _begin(self, start: Point, held: frozenset[int] = frozenset()) -> None:
        """End this descent and begin another, which keeps the `held` knobs fixed until the other knobs have adapted."""
        if self._centre is not None:
            self._ends = self._best([*self._ends, self._centre])
        self._centre, self._left, self._moved, self._waiting, self._held = start, [], True, [], held
        self._begun = {start: None}

    def _start(self, chance: np.random.Generator) -> tuple[Point, frozenset[int]]:
        """(where the next descent begins, the knobs that differ there from a good end and stay fixed at first)."""
        ends = self._ends if self._centre is None else self._best([*self._ends, self._centre])
        if not ends:
            return tuple(int(chance.integers(size)) for size in self._grid.sizes), frozenset()
        if chance.random() < _AFRESH:
            return self._given[int(chance.integers(len(self._given)))], frozenset()
        detour = self._detour(ends, chance) if chance.random() < _DETOURS else None
        if detour is not None:
            return detour
        base, knobs = ends[0], int(chance.integers(_KICK[0], _KICK[1] + 1))
        if len(ends) > 1 and chance.random() < _CROSSED:
            one, other = (ends[index] for index in chance.choice(len(ends), 2, replace=False))
            base = tuple(a if chance.random() < 0.5 else b for a, b in zip(one, other, strict=True))
            if base not in self._asked:
                return base, frozenset()
            knobs = _KICK[0]
        elif chance.random() > _BEST:
            base = ends[int(chance.integers(len(ends)))]
        start = kick(self._hopeful, base, knobs, chance)
        return start, frozenset(knob for knob, (a, b) in enumerate(zip(base, start, strict=True)) if a != b)

    def _detour(self, bases: list[Point], chance: np.random.Generator) -> tuple[Point, frozenset[int]] | None:
        """A new detour from any of the bases that loses little against the best of them; None where there is none."""
        found = [
            (self._loss(base, knob, point, bases[0]) + _SPREAD * chance.exponential(), point, knob, base)
            for base in bases
            if self._worth(base) < float("inf")
            for knob in range(len(base))
            for point in self._grid.beside(base, knob)
            if self._is_detour(base, knob, point)
        ]
        loss, start, knob, base = min(found, default=(float("inf"), bases[0], 0, bases[0]))
        if loss > _FAR:
            return None
        self._detours.add((base, start))
        self._turns[knob, start[knob]] += 1
        return start, frozenset({knob})

    def _is_detour(self, base: Point, knob: int, point: Point) -> bool:
        """Whether the step from the base to the point is a new detour that is likely to change the latency."""
        alike = self._contrasts.are_alike(knob, base[knob], point[knob])
        return not alike and (base, point) not in self._detours and self._values.get(point) != self._worth(base)

    def _hopeful(self, point: Point, knob: int) -> list[Point]:
        """Points that differ in that knob, only those that seem worth a try if there are any."""
        every = self._grid.beside(point, knob)
        return [each for each in every if not self._contrasts.is_vain(knob, point[knob], each[knob], _LOST[1])] or every

    def _loss(self, base: Point, knob: int, point: Point, best: Point) -> float:
        """The detour's known or assumed loss against the best end, as a fraction, plus _REPEAT for each repetition."""
        value = self._values.get(point, self._worth(base) * (1.0 + _UNKNOWN))
        return value / (self._worth(best) or 1.0) - 1.0 + _REPEAT * self._turns[knob, point[knob]]

    def _best(self, points: list[Point]) -> list[Point]:
        """The best of the points, best first, at most _ENDS, one for each latency."""
        every = sorted(set(points), key=lambda point: (self._worth(point), point), reverse=True)
        return list({self._worth(point): point for point in every}.values())[::-1][:_ENDS]

    def _worth(self, point: Point) -> float:
        return self._values.get(point, float("inf"))


def kick(beside: Callable[[Point, int], list[Point]], point: Point, knobs: int, chance: np.random.Generator) -> Point:
    """The point with other values in `knobs` random knobs; a knob for which `beside` has no other value stays."""
    for knob in chance.choice(len(point), min(knobs, len(point)), replace=False):
        others = beside(point, int(knob)) or [point]
        point = others[int(chance.integers(len(others)))]
    return point
