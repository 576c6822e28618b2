"""Which activations share scratch memory."""

from __future__ import annotations

from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import BufferKind, MemSpace, Page, PageAllocation
from flywheel.lowering.stamp import Stamper

PAGE_POLICIES: Final = ("linear", "graph_color", "none")


def allocate_pages(tables: Stamper, policy: str) -> PageAllocation | None:
    """A page a buffer (linear), pages reused once no task can still need them (graph_color), or no pages (none).

    A page passes from buffer A to buffer B only where every task that touches A happens before every writer of B.
    Raises ConfigError for another policy.
    """
    if policy not in PAGE_POLICIES:
        raise ConfigError(f"page_allocation={policy!r} is not one of {', '.join(PAGE_POLICIES)}")
    if policy == "none":
        return None
    lives = _lives(tables)
    sizes: list[int] = []
    spans: list[tuple[int, int]] = []
    residents: list[int] = []  # page -> the buffer that last moved in
    home: dict[int, int] = {}
    for buffer, life in lives.items():
        nbytes = tables.buffers[buffer].nbytes
        free = (
            [p for p, resident in enumerate(residents) if lives[resident].over_before(life)]
            if policy != "linear"
            else []
        )
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
