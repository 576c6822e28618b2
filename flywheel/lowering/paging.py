"""Which activations share scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Buffer, BufferKind, MemSpace, Page, PageAllocation, Run, Runs
from flywheel.ir.layers import Layers
from flywheel.lowering.stamp import Stamper

PAGE_POLICIES: Final = ("linear", "graph_color", "none")


def allocate_pages(tables: Stamper, tasks: Runs, policy: str) -> PageAllocation | None:
    """A page a buffer (linear), pages reused once no task can still need them (graph_color), or no pages (none).

    A page passes from buffer A to buffer B only where every task that touches A happens before every writer of B.
    `tables` have all layers for graph_color, else they are those of `tasks`. Raises ConfigError for another policy.
    """
    if policy not in PAGE_POLICIES:
        raise ConfigError(f"page_allocation={policy!r} is not one of {', '.join(PAGE_POLICIES)}")
    if policy == "none":
        return None
    return _linear(tables.buffers, tasks) if policy == "linear" else _shared(tables)


@dataclass(frozen=True, slots=True)
class _Resident:
    """A buffer that is paged, its bytes, and its first and last task."""

    buffer: int
    nbytes: int
    first_task: int
    last_task: int


def _linear(buffers: Sequence[Buffer], tasks: Runs) -> PageAllocation:
    if tasks.layers is None:
        residents = _residents(tasks.spelled, [_paged_bytes(buffer) for buffer in buffers])
    else:
        residents = _residents_of_layers(buffers, tasks, tasks.layers)
    space = MemSpace.GLOBAL_SCRATCH
    return PageAllocation(
        {each.buffer: page for page, each in enumerate(residents)},
        tuple([Page(page, space, each.nbytes, each.first_task, each.last_task)
               for page, each in enumerate(residents)]),
    )  # fmt: skip


def _residents_of_layers(buffers: Sequence[Buffer], tasks: Runs, layers: Layers) -> list[_Resident]:
    """All but the last layer are like the first of two templates, whose buffers the second one reads, too; the last is
    like the second, which what comes after the layers reads."""
    span, sizes = layers.buffers, [_paged_bytes(buffer) for buffer in buffers]
    found = _residents(tasks.repeated(2), sizes[: span.stop] + sizes[span.start : span.stop] + sizes[span.stop :])
    size = sum([len(run.tiles) for run in tasks.spelled[layers.runs.start : layers.runs.stop]])
    inner = [each for each in found if span.start <= each.buffer < span.stop]

    def further(some: Sequence[_Resident], by: int) -> list[_Resident]:
        move, later = by * span.size, by * size
        return [
            _Resident(each.buffer + move, each.nbytes, each.first_task + later, each.last_task + later)
            for each in some
        ]

    return [
        *[each for each in found if each.buffer < span.start],
        *[each for by in range(layers.times - 1) for each in further(inner, by)],
        *further([each for each in found if each.buffer >= span.stop], layers.times - 2),
    ]


def _residents(runs: Sequence[Run], sizes: Sequence[int | None]) -> list[_Resident]:
    """The paged buffers by first use."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    task = 0
    for run in runs:
        end = task + len(run.tiles) - 1
        for buffer in (*run.inputs, *run.outputs):
            if sizes[buffer] is not None:
                first.setdefault(buffer, task)
                last[buffer] = end
        task = end + 1
    return [_Resident(buffer, sizes[buffer] or 0, start, last[buffer]) for buffer, start in first.items()]


def _paged_bytes(buffer: Buffer) -> int | None:
    """None for what is in no page."""
    return buffer.nbytes if buffer.kind is BufferKind.ACTIVATION else None


def _shared(tables: Stamper) -> PageAllocation:
    lives = _lives(tables)
    sizes: list[int] = []
    spans: list[tuple[int, int]] = []
    residents: list[int] = []  # page -> the buffer that last moved in
    home: dict[int, int] = {}
    for buffer, life in lives.items():
        nbytes = tables.buffers[buffer].nbytes
        free = [page for page, resident in enumerate(residents) if lives[resident].over_before(life)]
        fitting = [page for page in free if sizes[page] >= nbytes]
        if fitting:
            page = min(fitting, key=lambda p: (sizes[p], p))
        elif free:
            page = max(free, key=lambda p: (sizes[p], -p))
            sizes[page] = nbytes
        else:
            page = len(sizes)
            sizes.append(nbytes)
            residents.append(buffer)
            spans.append((life.first_task, life.last_task))
        home[buffer] = page
        residents[page] = buffer
        spans[page] = (spans[page][0], max(spans[page][1], life.last_task))
    pages = tuple(Page(number, MemSpace.GLOBAL_SCRATCH, size, *spans[number]) for number, size in enumerate(sizes))
    return PageAllocation(home, pages)


class _Life:
    """Counters that users of a buffer signal, what its writers come after, and its range of task ids."""

    __slots__ = ("after", "first_task", "last_task", "users")

    def __init__(self, first_task: int) -> None:
        self.users = 0
        self.after: int | None = None
        self.first_task = self.last_task = first_task

    def over_before(self, other: _Life) -> bool:
        """Whether every user of this buffer happens before every writer of `other`."""
        return other.after is not None and not self.users & ~other.after


def _lives(tables: Stamper) -> dict[int, _Life]:
    """Lives of the activations, by first use."""
    lives: dict[int, _Life] = {}
    task = 0
    for run in tables.runs:
        after = 0
        for wait in run.waits:
            after |= tables.before[wait.counter] | 1 << wait.counter
        for buffer in (*run.inputs, *run.outputs):
            if tables.buffers[buffer].kind is BufferKind.ACTIVATION:
                life = lives.setdefault(buffer, _Life(task))
                life.users |= 1 << run.out_counter
                life.last_task = task + len(run.tiles) - 1
                if buffer in run.outputs:
                    life.after = after if life.after is None else life.after & after
        task += len(run.tiles)
    return lives
