"""Descent from many starts, one knob at a time, on values that come later than they are asked for.

A descent takes any better value of a knob until no knob has one. The next begins at another value of one knob of a good
end (a detour), a few knobs away from one (a kick), between two of them (a crossing), or again at one of the first
points. What a detour or a kick has changed stays as it is until the other knobs have followed: where several must
change together, none of the changes is better alone. Which values of a knob are not worth a try is learnt on the way.
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
"""Ends of descents that the next ones begin from, with knobs held or free, each of another value: equal values are
mostly the same program."""

_DETOURS: Final = 0.6
"""Share of descents that begin with a detour, while there are some that were not made."""

_SPREAD: Final = 0.006
"""Of the best latency: what is drawn and added to a detour's loss, on average. The least is the next."""

_REPEAT: Final = 0.006
"""Of the best latency: what each detour to the same value of the knob adds, from whatever end it was."""

_UNKNOWN: Final = 0.03
"""Of a latency: what a detour to a point of unknown latency is taken to lose."""

_FAR: Final = 0.1
"""Of the best latency: what a detour or a kick may lose."""

_BEST: Final = 0.6
"""Share of kicks that are from the best end; the others are from any."""

_CROSSED: Final = 0.3
"""Share of descents that begin between two ends."""

_AFRESH: Final = 0.2
"""Share of descents that begin again at one of the first points: in another order of knobs they end elsewhere."""

_FIRST: Final = 3
"""How many these are."""

_KICK: Final = (2, 4)
"""Knobs that a kick moves, least and most."""

_LOST: Final = (0.01, 0.03)
"""Of a latency: a value that lost more each time seems not to be worth a try; the second one while knobs are held and
where knobs are kicked, since such values may gain beside values that are seldom seen."""

_AGAIN: Final = 0.05
"""Share of values that seem not to be worth a try and are tried all the same."""

_STARTS: Final = 100
"""Starts in a row that lead to nothing untried, after which what is left of a small grid is walked."""


class Descent:
    """Asked for points, told their values in us, None where infeasible, in any order; it asks for none twice.

    What it asks for depends on what it was told and asked before, and on the `chance` it is given.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._values: dict[Point, float] = {}
        self._asked: set[Point] = set()
        self._ends: list[Point] = []
        self._given: tuple[Point, ...] = ()
        self._centre: Point | None = None
        self._begun: dict[Point, int | None] = {}  # of this descent: in which knob
        self._left: list[int] = []  # knobs of this round
        self._moved = True  # since the round began
        self._held: frozenset[int] = frozenset()  # knobs that stay until no other has a better value
        self._waiting: list[tuple[Point, int]] = []
        self._gains = np.ones(len(grid.sizes))
        self._detours: set[tuple[Point, Point]] = set()  # from where to where
        self._turns: Counter[tuple[int, int]] = Counter()  # detours by knob and value
        self._contrasts = Contrasts(grid)

    @property
    def values(self) -> dict[Point, float]:
        """What it was told, infeasible ones as infinite."""
        return self._values

    def fork(self) -> Descent:
        """One that can be asked in its place, and left alone: what is told to either, both know."""
        fork = copy(self)
        fork._asked, fork._begun = set(self._asked), dict(self._begun)
        fork._ends, fork._left, fork._waiting = list(self._ends), list(self._left), list(self._waiting)
        fork._gains, fork._detours, fork._turns = self._gains.copy(), set(self._detours), self._turns.copy()
        return fork

    def note(self, point: Point) -> None:
        """The point is on its way; if it was not asked for here, the descent will go there where it is better."""
        if point not in self._asked:
            self._asked.add(point)
            self._begun[point] = None
            self._given = (*self._given, point)[:_FIRST]

    def tell(self, point: Point, value: float | None) -> None:
        """The value of a point."""
        self.note(point)
        worth = self._values[point] = float("inf") if value is None else value
        self._contrasts.add(point, self._values)
        if point in self._begun and self._centre is not None and worth < self._worth(self._centre):
            self._move(point, self._begun[point])

    def ask(self, chance: np.random.Generator) -> Point:
        """A point that was not asked for; the best one where there is none left."""
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
        """The next point at the centre; None where the descent has ended."""
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
        """Whether a detour or a kick came out where the other knobs will hardly make up for it."""
        return bool(self._held) and float("inf") > self._worth(centre) > (1.0 + _FAR) * self._worth(self._ends[0])

    def _look(self, knob: int, chance: np.random.Generator) -> None:
        """Line up the other values of a knob, nearest first; go to one that is known to be better."""
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
        """End the descent and begin one that leaves the `held` knobs alone until the others have followed."""
        if self._centre is not None:
            self._ends = self._best([*self._ends, self._centre])
        self._centre, self._left, self._moved, self._waiting, self._held = start, [], True, [], held
        self._begun = {start: None}

    def _start(self, chance: np.random.Generator) -> tuple[Point, frozenset[int]]:
        """Where to begin, and the knobs that were changed there."""
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
        """One that was not made, of little loss against the best base, from any base; None where there is none."""
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
        """Whether the point beside the base is one that was not made and makes a difference."""
        alike = self._contrasts.are_alike(knob, base[knob], point[knob])
        return not alike and (base, point) not in self._detours and self._values.get(point) != self._worth(base)

    def _hopeful(self, point: Point, knob: int) -> list[Point]:
        """Points that differ in that knob, without values that seem not to be worth a try if there are others."""
        every = self._grid.beside(point, knob)
        return [each for each in every if not self._contrasts.is_vain(knob, point[knob], each[knob], _LOST[1])] or every

    def _loss(self, base: Point, knob: int, point: Point, best: Point) -> float:
        """How far a detour is behind the best end, as far as it is known, and how far it is put behind others."""
        value = self._values.get(point, self._worth(base) * (1.0 + _UNKNOWN))
        return value / (self._worth(best) or 1.0) - 1.0 + _REPEAT * self._turns[knob, point[knob]]

    def _best(self, points: list[Point]) -> list[Point]:
        """The best of them, best first, each of another value."""
        every = sorted(set(points), key=lambda point: (self._worth(point), point), reverse=True)
        return list({self._worth(point): point for point in every}.values())[::-1][:_ENDS]

    def _worth(self, point: Point) -> float:
        return self._values.get(point, float("inf"))


def kick(beside: Callable[[Point, int], list[Point]], point: Point, knobs: int, chance: np.random.Generator) -> Point:
    """Another value in each of so many knobs, as far as `beside` has any."""
    for knob in chance.choice(len(point), min(knobs, len(point)), replace=False):
        others = beside(point, int(knob)) or [point]
        point = others[int(chance.integers(len(others)))]
    return point
