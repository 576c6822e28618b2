"""The records of a program: buffers, tasks, counters, waits and pages. Source: docs/ir.md.

Sequences are tuples in programs that flywheel builds or reads. Nothing changes a record after its construction.
`make_task` and the like make many of them fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from math import prod
from typing import Any, Final, ParamSpec, TypeVar, cast

from flywheel.ir.dtype import BufferKind, DType, MemSpace
from flywheel.ir.opcodes import InstructionKind


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named tensor in the memory of GPU `rank`. `source` is the state-dict key of a WEIGHT or CONST.

    `part` (axis, first) means that the buffer holds only a part of its source: as much as its own shape, from `first`
    on along `axis`. None means all.
    """

    id: int
    name: str
    kind: BufferKind
    dtype: DType
    shape: Sequence[int]
    space: MemSpace = MemSpace.HBM
    source: str | None = None
    rank: int = 0
    part: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes; sub-byte types are rounded up."""
        return self.dtype.nbytes(self.numel)

    def contiguous_strides(self) -> tuple[int, ...]:
        """Row-major strides in elements."""
        strides, step = [], 1
        for dim in reversed(self.shape):
            strides.append(step)
            step *= dim
        return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Counter:
    """A uint32 that tasks only increment. It is zero at the start of every launch."""

    id: int
    init: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not start until `counters[counter] >= threshold`."""

    counter: int
    threshold: int


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction on one SM of GPU `rank`.

    When it completes, and all its writes are visible, it adds 1 to `out_counter`.
    """

    id: int
    op: InstructionKind
    inputs: Sequence[int]
    outputs: Sequence[int]
    out_counter: int
    waits: Sequence[Wait] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    sm: int | None = None
    est_bytes: int = 0
    est_flops: int = 0
    label: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """A physical scratch slot. `live_start` and `live_end` are task ids, or -1 where unknown, as the format defines."""

    id: int
    space: MemSpace
    nbytes: int
    live_start: int = -1
    live_end: int = -1


@dataclass(frozen=True, slots=True)
class PageAllocation:
    """Which page each paged activation lives in."""

    buffer_to_page: Mapping[int, int]
    pages: Sequence[Page]

    @property
    def total_scratch_bytes(self) -> int:
        """Sum of the pages' sizes."""
        return sum(page.nbytes for page in self.pages)


P = ParamSpec("P")
R = TypeVar("R")


def maker(kind: Callable[P, R]) -> Callable[P, R]:
    """A fast constructor of `kind`, a frozen dataclass with slots whose __init__ only assigns its fields.

    It fills a draft with the same slots by plain assignment, then turns the draft into the record.
    """
    columns: list[Any] = [
        (each.name, Any, field(default=each.default, default_factory=each.default_factory))
        for each in fields(cast(Any, kind))
    ]
    draft: Any = make_dataclass(f"{cast(Any, kind).__name__}Draft", columns, slots=True)

    def make(*values: P.args, **named: P.kwargs) -> R:
        record: R = draft(*values, **named)
        record.__class__ = kind  # type: ignore[assignment]
        return record

    return make


make_task: Final = maker(Task)
make_buffer: Final = maker(Buffer)
make_counter: Final = maker(Counter)
make_wait: Final = maker(Wait)
