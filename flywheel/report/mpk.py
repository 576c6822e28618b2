"""The predicted timeline of a Mirage MPK task graph, one track per worker, as a trace file and as a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.cost_model import TaskSpan
from flywheel.interop.mpk.graph import FIRST_TASK, INVALID, MpkGraph, place_of
from flywheel.interop.mpk.kinds import kind_name
from flywheel.interop.mpk.timing import Timing
from flywheel.ir import InstructionKind, MegakernelProgram, Task, Wait
from flywheel.report.chrome import Slice

_LAYER: Final = re.compile(r"layer_(\d{1,9})_")


def mpk_slices(graph: MpkGraph, timing: Timing) -> list[Slice]:
    """One slice for each task, from when its worker first polls it. Its parts are waiting and running."""
    tasks = _shown(graph, timing)
    return [
        Slice(tasks[span.node], span.worker, span.ready_us, span.done_us,
              (("waits", span.ready_us, span.met_us), ("runs", span.met_us, span.done_us)))
        for span in timing.spans
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class MpkTimeline:
    """A graph's tasks as a program, and a span for each. `sms` are the workers.

    The model of MPK has no time for multiplying: a task fills its pipeline, and then lasts as long as its bytes.
    """

    program: MegakernelProgram
    spans: Sequence[TaskSpan]
    sms: int


def mpk_timeline(graph: MpkGraph, timing: Timing, gpu: str) -> MpkTimeline:
    """The timeline that `layer` draws."""
    tasks = _shown(graph, timing)
    meta = {"model": f"MPK's task graph, rank {graph.rank},", "gpu": gpu}
    spans = [
        TaskSpan(
            tasks[each.node].id, each.worker, each.ready_us, each.met_us, each.done_us, each.filled_us - each.met_us
        )
        for each in timing.spans
    ]
    workers = max(span.worker for span in timing.spans) + 1
    return MpkTimeline(MegakernelProgram(meta=meta, tasks=tuple(tasks)), spans, workers)


def _shown(graph: MpkGraph, timing: Timing) -> list[Task]:
    """Each task as a flywheel NOP. Its label has the task's type and the layer of its tensors. A task without tensors
    takes the layer of the task before."""
    found, layer = [], ""
    for node, task in enumerate(graph.tasks[FIRST_TASK:]):
        numbers = [named[1] for tensor in task.inputs if (named := _LAYER.match(tensor.name))]
        if numbers:
            layer = f"L{numbers[0]}."
        elif any(tensor.name == "model_norm_weight" for tensor in task.inputs):
            layer = ""
        number = place_of(task.dependent)
        waits = () if task.dependent == INVALID else (Wait(number, graph.events[number].triggers),)
        found.append(
            Task(node + FIRST_TASK, InstructionKind.NOP, (), (), place_of(task.trigger), waits,
                 est_bytes=timing.nbytes_of[node], label=f"{layer}{kind_name(task.kind)}")
        )  # fmt: skip
    return found
