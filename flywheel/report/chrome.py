"""Spans on SMs in the Trace Event Format, one track an SM. ui.perfetto.dev and chrome://tracing open it.

Source: "Trace Event Format" of the Chromium project. docs/vm.md lists the events that flywheel writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flywheel.cost_model import TaskSpan
from flywheel.ir import Task
from flywheel.report.layer import operation
from flywheel.report.palette import reserved
from flywheel.vm.gpu.trace import LaunchTrace

_PROCESS: Final = 1


@dataclass(frozen=True, slots=True)
class Slice:
    """A task on a track: its span in us, and its `parts` (name, start, end), in order and within the span."""

    task: Task
    sm: int
    start_us: float
    end_us: float
    parts: tuple[tuple[str, float, float], ...] = ()


def predicted_slices(tasks: Iterable[Task], spans: Iterable[TaskSpan]) -> list[Slice]:
    """One slice for each span of `tasks`, without parts."""
    by_id = {task.id: task for task in tasks}
    return [Slice(by_id[span.task], span.sm, span.start_us, span.end_us) for span in spans]


def measured_slices(trace: LaunchTrace) -> list[Slice]:
    """One slice for each task, waiting included. Its parts are the task's phases."""
    return [
        Slice(traced.task, traced.sm, traced.current_us, traced.done_us,
              tuple((phase.value, start, end) for phase, start, end in traced.phases))
        for traced in trace.tasks
    ]  # fmt: skip


def chrome_trace(title: str, slices: Iterable[Slice], facts: Mapping[str, Any]) -> str:
    """The JSON text of a trace. `title` names the process, and `facts` are its metadata.

    A slice is named after its operation, so each operation has one colour. Parts that took no time are left out. Slices
    of one SM must not overlap.
    """
    ordered = sorted(slices, key=lambda each: (each.start_us, each.sm, each.end_us))
    names = [_named(_PROCESS, 0, "process_name", name=title)]
    for sm in sorted({each.sm for each in ordered}):
        names.append(_named(_PROCESS, _track(sm), "thread_name", name=f"SM {sm}"))
        names.append(_named(_PROCESS, _track(sm), "thread_sort_index", sort_index=sm))
    events = [event for each in ordered for event in _events(each)]
    events.sort(key=lambda event: event["ts"])  # a task stays before its first part
    document = {"traceEvents": [*names, *events], "displayTimeUnit": "ns", "otherData": dict(facts)}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _track(sm: int) -> int:
    """The number of an SM's track. Viewers of operating-system traces take thread 0 for the idle thread, so it is not
    used."""
    return sm + 1


def _named(process: int, thread: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": args}


def _events(each: Slice) -> list[dict[str, Any]]:
    task = each.task
    args = {
        "task": task.id,
        "label": task.label,
        "opcode": task.op.name,
        "bytes": task.est_bytes,
        "waits": ", ".join(f"counter {wait.counter} >= {wait.threshold}" for wait in task.waits),
        "signals": f"counter {task.out_counter}",
    }
    name = operation(task.label)
    whole = _complete(each.sm, name, "task", each.start_us, each.end_us) | {"cname": reserved(name), "args": args}
    parts = [_complete(each.sm, part, "phase", start, end) for part, start, end in each.parts]
    return [whole, *(part for part in parts if part["dur"] > 0)]


def _complete(sm: int, name: str, category: str, start_us: float, end_us: float) -> dict[str, Any]:
    """A complete event. Times are rounded to whole nanoseconds, so that a nested event stays nested in the text."""
    start_ns, end_ns = round(start_us * 1e3), round(end_us * 1e3)
    return {"ph": "X", "pid": _PROCESS, "tid": _track(sm), "name": name, "cat": category, "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3}  # fmt: skip
