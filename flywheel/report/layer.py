"""Draws one layer of a schedule on every SM, and the operations' shares of the time, predicted or measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from flywheel.cost_model import TaskSpan
from flywheel.ir import MegakernelProgram
from flywheel.report.history import WIDTH
from flywheel.report.palette import colour
from flywheel.report.svg import Axis, boxes, element, label, picture, short

BY_MODEL: Final = "by the cost model"
"""Origin of predicted spans."""

_LABEL: Final = re.compile(r"L(\d+)\.(.+)")
_LEFT, _TOP, _SPACE = 54.0, 32.0, 420.0
_LONGEST: Final = 50
"""Letters of a name in the legend."""


class Timeline(Protocol):
    """A program and a span for each task: from the time when its counters were complete until it signalled."""

    @property
    def program(self) -> MegakernelProgram:
        """The program that ran."""

    @property
    def spans(self) -> Sequence[TaskSpan]:
        """The tasks' spans, in any order."""


@dataclass(frozen=True, slots=True)
class Share:
    """One operation's tasks, and their share of the time of all tasks."""

    operation: str
    tasks: int
    time_share: float


def shares(timeline: Timeline) -> list[Share]:
    """The shares of all operations of the step, all layers together, ordered by time."""
    names = {task.id: operation(task.label) for task in timeline.program.tasks}
    counts: Counter[str] = Counter()
    times: dict[str, float] = {}
    for span in timeline.spans:
        name = names[span.task]
        counts[name] += 1
        times[name] = times.get(name, 0.0) + span.end_us - span.start_us
    total = sum(times.values()) or 1.0
    found = [Share(name, counts[name], spent / total) for name, spent in times.items()]
    return sorted(found, key=lambda share: (-share.time_share, share.operation))


def layer(timeline: Timeline, origin: str = BY_MODEL, place: str = "SM") -> str:
    """A picture of the middle layer, one SM a row; of the whole step where no task belongs to a layer.

    The title says the `origin` of the spans, and `place` names a row. Lines part the rows of several GPUs.
    """
    labels = {task.id: task.label for task in timeline.program.tasks}
    numbers = sorted({int(found[1]) for text in labels.values() if (found := _LABEL.match(text))})
    chosen = numbers[len(numbers) // 2] if numbers else None
    prefix = "" if chosen is None else f"L{chosen}."
    spans = [span for span in timeline.spans if labels[span.task].startswith(prefix)]
    names: dict[str, list[TaskSpan]] = {}
    for span in sorted(spans, key=lambda span: span.task):
        names.setdefault(operation(labels[span.task]), []).append(span)
    start, end = min(span.start_us for span in spans), max(span.end_us for span in spans)
    sms = max(span.sm for span in timeline.spans) + 1
    row = max(2.0, min(9.0, _SPACE / sms))
    across = Axis(0.0, max(end - start, 1e-3), _LEFT, WIDTH - 20)
    bottom = _TOP + row * sms
    parts = [
        element("path", d=_boxes(mine, across, start, row), fill=colour(name), class_="tasks")
        for name, mine in names.items()
    ]
    title = f"{_work(timeline.program)}{_what(chosen)} on every {place}, {origin}"
    order, borders = _gpus(timeline.program, row)
    began = f"us since {_what(chosen)} began, {origin}; a row is {_a(place)}{order}"
    parts += [
        label(_LEFT, 18, title, font_weight="bold"),
        element("path", d=f"M{_LEFT} {_TOP}V{bottom:.2f}H{WIDTH - 20}{borders}", class_="axis"),
        *(label(across(value), bottom + 16, short(value), "middle faint") for value in across.ticks(10)),
        *(label(_LEFT - 6, _TOP + row * (sm + 0.5) + 4, str(sm), "end faint") for sm in _rows(sms)),
        label((_LEFT + WIDTH) / 2, bottom + 34, began, "middle faint"),
    ]
    return picture(WIDTH, bottom + 50 + 20 * _lines(list(names)), title, [*parts, *_legend(list(names), bottom + 56)])


def operation(text: str) -> str:
    """A task's label without its layer: `L3.q_proj` is `q_proj`."""
    found = _LABEL.match(text)
    return found[2] if found else text


def layer_number(text: str) -> int | None:
    """The layer in a task's label: of `L3.q_proj` 3. None for a task outside the layers."""
    found = _LABEL.match(text)
    return int(found[1]) if found else None


def _work(program: MegakernelProgram) -> str:
    """The workload that the program was lowered for, as far as the program tells."""
    model, gpu, weights, batch = (program.meta.get(name) for name in ("model", "gpu", "weights", "batch"))
    stored = f", {weights} weights" if weights else ""
    sequences = f", {batch} sequences" if isinstance(batch, int) and batch > 1 else ""
    several = f"{program.ranks}x" if program.ranks > 1 else ""
    return f"{model}{stored}{sequences} on {several}{gpu}: " if model and gpu else ""


def _gpus(program: MegakernelProgram, row: float) -> tuple[str, str]:
    """(in which order rows are of several GPUs, a path of lines between these); nothing for one GPU."""
    if program.ranks == 1 or program.target is None:
        return "", ""
    each = row * program.target.num_sms
    lines = "".join(f"M{_LEFT} {_TOP + each * rank:.2f}H{WIDTH - 20}" for rank in range(1, program.ranks))
    return f"; GPU 0 is at the top, GPU {program.ranks - 1} at the bottom", lines


def _what(chosen: int | None) -> str:
    return "the step" if chosen is None else f"layer {chosen}"


def _boxes(spans: list[TaskSpan], across: Axis, start: float, row: float) -> str:
    gap = 0.5 if row > 3 else 0.0
    return boxes(
        (left, _TOP + row * span.sm, across(span.end_us - start) - left, row - gap)
        for span in spans
        for left in (across(span.start_us - start),)
    )


def _rows(sms: int) -> list[int]:
    step = max(1, sms // 8)
    return list(range(0, sms, step))


def _a(place: str) -> str:
    return f"an {place}" if place == "SM" else f"a {place}"


def _columns(names: list[str]) -> int:
    """Columns of the legend: up to four, with room for the longest name at 8 pixels a letter."""
    return min(4, max(1, int((WIDTH - _LEFT) / (8 * min(_LONGEST, max(map(len, names))) + 24))))


def _lines(names: list[str]) -> int:
    return -(-len(names) // _columns(names))


def _legend(names: list[str], y: float) -> list[str]:
    parts, columns = [], _columns(names)
    for order, name in enumerate(names):
        x, line = _LEFT + order % columns * ((WIDTH - _LEFT) / columns), y + order // columns * 20
        parts.append(element("rect", x=x, y=line - 10, width=12, height=12, fill=colour(name)))
        parts.append(label(x + 18, line, name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"))
    return parts
