"""Races on cells. A cell is a piece of memory that every access takes as a whole or not at all.

In a topological order, the writes of a cell must form a chain. Each read must come after the write before it and before
the write after it. That suffices: the relation is transitive, and of two neighbours the later one in a topological
order cannot come first. Additions to a cell need no order with each other. So each addition must come after the write
before all of them, and after every read since that write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.ir.firing import ProofTask
from flywheel.ir.order import HappensBefore, QueueOrder

Cells = tuple[int, ...]
"""Numbers of cells. Accesses to the same memory share one tuple."""


@dataclass(frozen=True, slots=True)
class Touches:
    """The cells that a step reads, writes and adds to. Additions to a cell commute with one another only."""

    reads: Sequence[Cells] = ()
    writes: Sequence[Cells] = ()
    adds: Sequence[Cells] = ()


@dataclass(frozen=True, slots=True)
class Clash:
    """Two steps, by position, that touch a cell without an order. `second` comes later in the topological order."""

    first: int
    second: int
    cell: int
    first_writes: bool
    second_writes: bool


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep. `late` has (step, cell) for reads before the first write of a cell that others write."""

    clashes: list[Clash]
    late: list[tuple[int, int]]


MAX_CLASHES: Final = 50_000
"""Clashes after which a sweep ends."""

_By = dict[int, list[int]]
"""Counter -> positions of the steps that signal it. They have the same order with any other step."""


def sweep(
    steps: Sequence[ProofTask],
    order: Sequence[int],
    before: HappensBefore,
    touches: Sequence[Touches],
    queues: QueueOrder | None = None,
    part: int = 0,
) -> Swept:
    """The clashes between neighbours in `order`, which is topological: they touch a cell without an order, and one of
    them writes. Steps that `queues` orders do not clash; it is of the same `order`.

    It lists all, or about MAX_CLASHES of them if there are more; if the first `part` steps have some, only theirs.
    """
    state = _CellState(steps, before, touches, queues)
    for place, index in enumerate(order):
        if len(state.swept.clashes) >= (1 if place == part else MAX_CLASHES):
            break
        touch = touches[index]
        for cells in touch.reads:
            state.read(index, cells)
        for cells in touch.writes:
            state.write(index, cells, adds=False)
        for cells in touch.adds:
            state.write(index, cells, adds=True)
        state.note(index, touch)
    return state.swept


class _CellState:
    """The steps that touched each cell since its last plain write."""

    __slots__ = ("_adding", "_base", "_before", "_live", "_queues", "_readers", "_steps", "_writers", "swept")

    def __init__(
        self, steps: Sequence[ProofTask], before: HappensBefore, touches: Sequence[Touches], queues: QueueOrder | None
    ) -> None:
        written = {cell for touch in touches for part in (*touch.writes, *touch.adds) for cell in part}
        self._steps, self._before, self._queues = steps, before, queues
        self._writers: dict[int, _By] = {cell: {} for cell in written}
        self._readers: dict[int, _By] = {cell: {} for cell in written}
        self._base: dict[int, _By] = {}  # writers before the additions
        self._adding: set[int] = set()
        self._live: dict[int, Cells] = {}  # identity of a part -> its cells that are written
        self.swept = Swept([], [])

    def _written(self, part: Cells) -> Cells:
        live = self._live.get(id(part))
        if live is None:
            live = self._live[id(part)] = tuple([cell for cell in part if cell in self._writers])
        return live

    def read(self, index: int, part: Cells) -> None:
        """Check a read of `part` against the writes before it."""
        live, writers = self._written(part), self._writers
        held = [writers[cell] for cell in live]
        if not all(held):
            self.swept.late.append((index, next(cell for cell in live if not writers[cell])))
        if not self._after(held, index):
            self._blame(index, [(cell, writers[cell]) for cell in live], (True, False))

    def write(self, index: int, part: Cells, adds: bool) -> None:
        """Check a write of `part` against the writes before it, and against the reads since the last plain write."""
        for held, writes in ((self._readers, False), (self._writers, True)):
            pairs = [(cell, self._rivals(cell, held, adds and writes)) for cell in part]
            if not self._after([by for _, by in pairs], index):
                self._blame(index, pairs, (writes, True))

    def _rivals(self, cell: int, held: Mapping[int, _By], adds: bool) -> _By:
        return self._base[cell] if adds and cell in self._adding else held[cell]

    def _after(self, held: Sequence[_By], index: int) -> bool:
        signals: set[int] = set().union(*held)
        if not signals:
            return True
        return self._before.reached(tuple(sorted(signals)), self._before.wait_class[index])

    def _blame(self, index: int, pairs: Sequence[tuple[int, _By]], writes: tuple[bool, bool]) -> None:
        blamed = {index}
        group = self._before.wait_class[index]
        queued = 0 if self._queues is None else self._queues.before(index)
        for cell, by in pairs:
            for counter, others in by.items():
                if not self._before.reached((counter,), group):
                    fresh = [other for other in others if other not in blamed and not queued >> other & 1]
                    blamed.update(fresh)
                    self.swept.clashes.extend(Clash(other, index, cell, *writes) for other in fresh)

    def note(self, index: int, touch: Touches) -> None:
        """Record what a step touched, after its checks, since it does not clash with itself."""
        counter = self._steps[index].out_counter
        for part in touch.reads:
            for cell in self._live[id(part)]:
                self._readers[cell].setdefault(counter, []).append(index)
        for part in touch.adds:
            for cell in part:
                if cell not in self._adding:
                    self._adding.add(cell)
                    self._base[cell], self._writers[cell] = self._writers[cell], {}
                self._writers[cell].setdefault(counter, []).append(index)
        for part in touch.writes:
            for cell in part:
                self._adding.discard(cell)
                self._writers[cell] = {counter: [index]}
                self._readers[cell] = {}
