"""Which activations share scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Buffer, BufferKind, MemSpace, Page, PageAllocation, Run, Runs
from flywheel.ir.compressed import NO_LAYERS, Layers
from flywheel.lowering.shared_pages import allocate_shared

PAGE_POLICIES: Final = ("linear", "graph_color", "none")


def allocate_pages(buffers: Sequence[Buffer], tasks: Runs, policy: str) -> PageAllocation | None:
    """The pages of a program: one for each buffer (linear), pages that buffers reuse (graph_color), or None (none).

    A page passes from buffer A to buffer B only where every task that touches A happens before every writer of B. A
    page belongs to one GPU, and no page holds buffers that GPUs exchange. `buffers` have the template once, if `tasks`
    have layers. Raises ConfigError for another policy.
    """
    if policy not in PAGE_POLICIES:
        raise ConfigError(f"page_allocation={policy!r} is not one of {', '.join(PAGE_POLICIES)}")
    if policy == "none":
        return None
    allocate = _linear if policy == "linear" else allocate_shared
    ranks = 1 + max([buffer.rank for buffer in buffers], default=0)
    exchanged = set[int]() if ranks == 1 else _exchanged(buffers, tasks.spelled)
    sizes = [
        buffer.nbytes if buffer.kind is BufferKind.ACTIVATION and buffer.id not in exchanged else None
        for buffer in buffers
    ]
    if ranks == 1:
        return allocate(sizes, tasks)
    pairs = list(zip(buffers, sizes, strict=True))
    own = [[size if buffer.rank == rank else None for buffer, size in pairs] for rank in range(ranks)]
    return _together([allocate(each, tasks) for each in own])


def _exchanged(buffers: Sequence[Buffer], runs: Sequence[Run]) -> set[int]:
    """The buffers that are pushed and those that pushes write. A push may still read after all its waiters on its GPU
    have gone on."""
    pushes = [run for run in runs if run.outputs and buffers[run.outputs[0]].rank != run.rank]
    return {number for run in pushes for number in (*run.inputs, *run.outputs)}


def _together(parts: Sequence[PageAllocation]) -> PageAllocation:
    """The pages of several GPUs as one allocation."""
    homes: dict[int, int] = {}
    pages: list[Page] = []
    for part in parts:
        homes |= {buffer: page + len(pages) for buffer, page in part.buffer_to_page.items()}
        pages += [replace(page, id=page.id + len(pages)) for page in part.pages]
    return PageAllocation(homes, tuple(pages))


@dataclass(frozen=True, slots=True)
class _Resident:
    """A paged buffer, its bytes, and its first and last task."""

    buffer: int
    nbytes: int
    first_task: int
    last_task: int


def _linear(sizes: Sequence[int | None], tasks: Runs) -> PageAllocation:
    if tasks.layers is NO_LAYERS:
        residents = _residents(tasks.spelled, sizes)
    else:
        residents = _residents_of_layers(sizes, tasks, tasks.layers)
    space = MemSpace.GLOBAL_SCRATCH
    return PageAllocation(
        {each.buffer: page for page, each in enumerate(residents)},
        tuple([Page(page, space, each.nbytes, each.first_task, each.last_task)
               for page, each in enumerate(residents)]),
    )  # fmt: skip


def _residents_of_layers(sizes: Sequence[int | None], tasks: Runs, layers: Layers) -> list[_Resident]:
    """The paged buffers of a program with layers.

    Each layer but the last is like the first of two templates: the next layer reads its buffers, too. The last layer is
    like the second template: the epilogue reads its buffers.
    """
    span = layers.buffers
    twice = [*sizes[: span.stop], *sizes[span.start : span.stop], *sizes[span.stop :]]
    found = _residents(tasks.repeated(2), twice)
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
