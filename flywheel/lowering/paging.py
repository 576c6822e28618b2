"""Which activations share scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Buffer, BufferKind, MemSpace, Page, PageAllocation, Run, Runs
from flywheel.ir.layers import Layers
from flywheel.lowering.shared_pages import allocate_shared

PAGE_POLICIES: Final = ("linear", "graph_color", "none")


def allocate_pages(buffers: Sequence[Buffer], tasks: Runs, policy: str) -> PageAllocation | None:
    """A page a buffer (linear), pages reused once no task can still need them (graph_color), or no pages (none).

    A page passes from buffer A to buffer B only where every task that touches A happens before every writer of B.
    `buffers` have the template once, where `tasks` have layers. Raises ConfigError for another policy.
    """
    if policy not in PAGE_POLICIES:
        raise ConfigError(f"page_allocation={policy!r} is not one of {', '.join(PAGE_POLICIES)}")
    if policy == "none":
        return None
    return _linear(buffers, tasks) if policy == "linear" else allocate_shared(buffers, tasks)


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
