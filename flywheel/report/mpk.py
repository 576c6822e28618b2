"""The predicted timeline of a task graph of Mirage MPK, for the viewers of traces: one track a worker."""

from __future__ import annotations

from flywheel.interop.mpk.graph import FIRST_TASK, INVALID, MpkGraph, place_of
from flywheel.interop.mpk.kinds import kind_name
from flywheel.interop.mpk.timing import Timing
from flywheel.ir import InstructionKind, Task, Wait
from flywheel.report.chrome import Slice


def mpk_slices(graph: MpkGraph, timing: Timing) -> list[Slice]:
    """A slice a task, from when its worker looks at it, with what it waits and what it runs as parts."""
    found = []
    for span in timing.spans:
        place = span.node + FIRST_TASK
        task = graph.tasks[place]
        number = place_of(task.dependent)
        waits = () if task.dependent == INVALID else (Wait(number, graph.events[number].triggers),)
        shown = Task(
            place, InstructionKind.NOP, (), (), place_of(task.trigger), waits,
            est_bytes=timing.nbytes_of[span.node], label=kind_name(task.kind),
        )  # fmt: skip
        parts = (("waits", span.ready_us, span.met_us), ("runs", span.met_us, span.done_us))
        found.append(Slice(shown, span.worker, span.ready_us, span.done_us, parts))
    return found
