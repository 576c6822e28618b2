"""Pages that pass from one activation to another (the policy graph_color)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from flywheel.ir import MemSpace, Page, PageAllocation, Run, Runs
from flywheel.ir.compressed import Layers

_SEEN: Final = 8
"""How many templates are enough to see whether pages pass on alike from each template to the next."""


def allocate_shared(sizes: Sequence[int | None], tasks: Runs) -> PageAllocation:
    """Pages for all buffers with a size, by first use. Each goes to the smallest fitting page that no task can still
    need."""
    layers = tasks.layers
    if layers.times <= _SEEN:
        return _allocation(_pass_on(tasks.runs, _bytes_of(sizes, layers, layers.times)))
    state = _pass_on(tasks.repeated(_SEEN), _bytes_of(sizes, layers, _SEEN))
    if not _is_steady(state, layers):
        return _allocation(_pass_on(tasks.runs, _bytes_of(sizes, layers, layers.times)))
    size = sum([len(run.tiles) for run in tasks.spelled[layers.runs.start : layers.runs.stop]])
    return _allocation(_of_all_layers(state, layers, size))


@dataclass(slots=True)
class _Pages:
    """Pages by number: bytes, and first and last task. Also the page of each buffer, by first use."""

    sizes: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    home: dict[int, int] = field(default_factory=dict)

    def residents(self, stop: int) -> list[int | None]:
        """For each page, its last buffer below `stop`."""
        last: dict[int, int] = {page: buffer for buffer, page in self.home.items() if buffer < stop}
        return [last.get(page) for page in range(len(self.sizes))]


def _pass_on(runs: Sequence[Run], sizes: Sequence[int | None]) -> _Pages:
    lives = _lives(runs, sizes)
    pages = _Pages()
    residents: list[int] = []  # page -> the buffer that last moved in
    for buffer, life in lives.items():
        nbytes = sizes[buffer] or 0
        free = [page for page, resident in enumerate(residents) if lives[resident].over_before(life)]
        fitting = [page for page in free if pages.sizes[page] >= nbytes]
        if fitting:
            page = min(fitting, key=lambda p: (pages.sizes[p], p))
        elif free:
            page = max(free, key=lambda p: (pages.sizes[p], -p))
            pages.sizes[page] = nbytes
        else:
            page = len(residents)
            pages.sizes.append(nbytes)
            residents.append(buffer)
            pages.spans.append((life.first_task, life.last_task))
        pages.home[buffer] = page
        residents[page] = buffer
        pages.spans[page] = (pages.spans[page][0], max(pages.spans[page][1], life.last_task))
    return pages


def _is_steady(pages: _Pages, layers: Layers) -> bool:
    """Whether the last template found the pages as the template before it did: each page held a buffer of the previous
    template.

    Which buffer may follow which is the same in every template, so all later templates find the pages like that, too.
    """
    span = layers.buffers
    stop = span.start + _SEEN * span.size
    last, before = (pages.residents(stop - by * span.size) for by in (0, 1))
    own = range(stop - span.size, stop)
    created = {page for page, resident in enumerate(last) if resident is None}  # first used after the layers
    steady = all(
        one is not None and other is not None and one in own and other == one - span.size
        for page, (one, other) in enumerate(zip(last, before, strict=True))
        if page not in created
    )
    return steady and _stays_home(pages, layers, stop)


def _stays_home(pages: _Pages, layers: Layers, stop: int) -> bool:
    """Whether each buffer of the last template is in the page that its counterpart in the template before has."""
    size = layers.buffers.size
    return all(pages.home.get(number) == pages.home.get(number - size) for number in range(stop - size, stop))


def _of_all_layers(pages: _Pages, layers: Layers, tasks: int) -> _Pages:
    """The pages for all of the layers. What belongs to the last template, and to the part after it, moves further on. A
    template has `tasks` tasks."""
    span, again = layers.buffers, layers.times - _SEEN
    stop = span.start + _SEEN * span.size
    last = {buffer: page for buffer, page in pages.home.items() if stop - span.size <= buffer < stop}
    home = {buffer: page for buffer, page in pages.home.items() if buffer < stop}
    for by in range(1, again + 1):
        home |= {buffer + by * span.size: page for buffer, page in last.items()}
    home |= {buffer + again * span.size: page for buffer, page in pages.home.items() if buffer >= stop}
    first_behind = {page: buffer >= stop for buffer, page in reversed(pages.home.items())}
    later = again * tasks
    spans = [
        (first + later if first_behind[page] else first, end + later) for page, (first, end) in enumerate(pages.spans)
    ]
    return _Pages(pages.sizes, spans, home)


def _allocation(pages: _Pages) -> PageAllocation:
    records = [
        Page(number, MemSpace.GLOBAL_SCRATCH, size, *span)
        for number, (size, span) in enumerate(zip(pages.sizes, pages.spans, strict=True))
    ]
    return PageAllocation(pages.home, tuple(records))


def _bytes_of(sizes: Sequence[int | None], layers: Layers, times: int) -> list[int | None]:
    """Bytes of each buffer, with the template `times` times; None for a buffer in no page."""
    span = layers.buffers
    return [*sizes[: span.start], *list(sizes[span.start : span.stop]) * times, *sizes[span.stop :]]


class _Life:
    """The counters that a buffer's users signal, the counters that all its writers come after, and its range of task
    ids."""

    __slots__ = ("after", "first_task", "last_task", "users")

    def __init__(self, first_task: int) -> None:
        self.users = 0
        self.after: int | None = None
        self.first_task = self.last_task = first_task

    def over_before(self, other: _Life) -> bool:
        """Whether every user of this buffer happens before every writer of `other`."""
        return other.after is not None and not self.users & ~other.after


def _lives(runs: Sequence[Run], sizes: Sequence[int | None]) -> dict[int, _Life]:
    """The lives of the activations, by first use."""
    lives: dict[int, _Life] = {}
    before: dict[int, int] = {}  # counter -> bit set of the counters that complete before it
    task = 0
    for run in runs:
        after = 0
        for wait in run.waits:
            after |= before[wait.counter] | 1 << wait.counter
        before[run.out_counter] = before.get(run.out_counter, 0) | after
        for buffer in (*run.inputs, *run.outputs):
            if sizes[buffer] is not None:
                life = lives.setdefault(buffer, _Life(task))
                life.users |= 1 << run.out_counter
                life.last_task = task + len(run.tiles) - 1
                if buffer in run.outputs:
                    life.after = after if life.after is None else life.after & after
        task += len(run.tiles)
    return lives
