"""MegakernelProgram, a complete schedule that can run once it is validated, and answers about the latest one, which
lowering, proof, id and prediction share. Source: docs/ir.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar
from weakref import ref

from flywheel.ir.config import ScheduleConfig
from flywheel.ir.records import Buffer, Counter, PageAllocation, Task
from flywheel.ir.target import GpuTarget
from flywheel.ir.version import ABI_VERSION, IR_VERSION


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MegakernelProgram:
    """The buffers, counters and tasks of one decode step on `ranks` GPUs, each of them a `target`.

    The list order of `tasks` is also the order of each SM's queue.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    target: GpuTarget | None = None
    buffers: Sequence[Buffer] = ()
    counters: Sequence[Counter] = ()
    tasks: Sequence[Task] = ()
    pages: PageAllocation | None = None
    config: ScheduleConfig | None = None
    ir_version: str = IR_VERSION
    abi_version: str = ABI_VERSION
    ranks: int = 1


Found = TypeVar("Found")


def once(function: Callable[[MegakernelProgram], Found]) -> Callable[[MegakernelProgram], Found]:
    """`function`, with its latest answer kept as long as its program lives, which the answer must not refer to. It
    answers again with that when it gets the same object. Errors are not kept."""
    latest: tuple[ref[MegakernelProgram], Found] | None = None

    def forget(gone: ref[MegakernelProgram]) -> None:
        nonlocal latest
        known = latest
        if known is not None and known[0] is gone:
            latest = None

    @wraps(function)
    def found(program: MegakernelProgram) -> Found:
        nonlocal latest
        known = latest  # another thread may replace it
        if known is None or known[0]() is not program:
            known = latest = ref(program, forget), function(program)
        return known[1]

    return found
