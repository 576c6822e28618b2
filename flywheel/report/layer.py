"""Draws what every SM does while one layer of a schedule runs, predicted or measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from flywheel.cost_model import State, TaskSpan, state_shares
from flywheel.ir import MegakernelProgram
from flywheel.report.history import WIDTH
from flywheel.report.svg import PlotAxis, element, label, picture, polyline, short, strokes, tip

BY_MODEL: Final = "by the cost model"
"""Origin of predicted spans."""

MEANINGS: Final[Mapping[State, str]] = MappingProxyType(
    {
        State.MULTIPLY: "it multiplies",
        State.STAGE: "it makes the vector to multiply: loads, norms, merges",
        State.OTHER: "its other work: sums, attention, stores, signals",
        State.STARVE: "it has the vector and waits for weights",
        State.WAIT: "it waits for what other SMs have yet to write",
        State.IDLE: "it has no task",
    }
)
"""What an SM does in each state, in the order of legends and tables."""

_LABEL: Final = re.compile(r"L(\d+)\.(.+)")
_LEFT, _RIGHT, _TOP, _SPACE = 54.0, WIDTH - 20, 32.0, 420.0
_BAR: Final = 15.0
"""Height of an operation's line."""
_LONGEST: Final = 50
"""Letters of a name."""
_LETTER: Final = 7.0
"""Width of a letter, rounded up."""


class Timeline(Protocol):
    """A program, the spans of its tasks in any order, and the number of SMs of all GPUs."""

    @property
    def program(self) -> MegakernelProgram:
        """The program that ran."""

    @property
    def spans(self) -> Sequence[TaskSpan]:
        """The tasks' spans, in any order."""

    @property
    def sms(self) -> int:
        """SMs that the launch had, of all GPUs together."""


@dataclass(frozen=True, slots=True)
class Share:
    """One operation's tasks, and their share of the time of all tasks, waiting excluded."""

    operation: str
    tasks: int
    time_share: float


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a launch that a picture shows: while the tasks of the middle `layer` run; the whole step where no
    task belongs to a layer (None). `names` are these tasks by operation."""

    layer: int | None
    start_us: float
    end_us: float
    names: Mapping[str, Sequence[TaskSpan]]


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


def step_states(timeline: Timeline) -> dict[State, float]:
    """The share of each state in the time of all SMs, from the first start of a task to the last end."""
    start, end = min(span.came_us for span in timeline.spans), max(span.end_us for span in timeline.spans)
    return state_shares(timeline.spans, timeline.sms, start, end)


def window(timeline: Timeline) -> Window:
    """What `layer` draws."""
    labels = {task.id: task.label for task in timeline.program.tasks}
    numbers = sorted({int(found[1]) for text in labels.values() if (found := _LABEL.match(text))})
    chosen = numbers[len(numbers) // 2] if numbers else None
    prefix = "" if chosen is None else f"L{chosen}."
    spans = [span for span in timeline.spans if labels[span.task].startswith(prefix)]
    names: dict[str, list[TaskSpan]] = {}
    for span in sorted(spans, key=lambda span: (span.start_us, span.task)):
        names.setdefault(operation(labels[span.task]), []).append(span)
    return Window(chosen, min(span.start_us for span in spans), max(span.end_us for span in spans), names)


def window_states(timeline: Timeline, shown: Window) -> dict[State, float]:
    """The share of each state in the picture: the area of its colour."""
    return state_shares(timeline.spans, timeline.sms, shown.start_us, shown.end_us)


def layer(timeline: Timeline, origin: str = BY_MODEL, place: str = "SM") -> str:
    """A picture of what all SMs do while the middle layer runs, one SM a row. Each state has a colour, whose area is
    the share that the legend states, with that of the whole step. Below it are the times of the layer's operations.

    The title says the `origin` of the spans, and `place` names a row. Lines part the rows of several GPUs.
    """
    shown = window(timeline)
    row = max(2.0, min(9.0, _SPACE / timeline.sms))
    across = PlotAxis(0.0, max(shown.end_us - shown.start_us, 1e-3), _LEFT, _RIGHT)
    bottom = _TOP + row * timeline.sms
    title = f"{_work(timeline.program)}{_what(shown.layer)} on every {place}, {origin}"
    order, borders = _gpus(timeline.program, row)
    began = f"us since {_what(shown.layer)} began, {origin}; a row is {_a(place)}{order}"
    lines, end = _operations(shown, across, bottom + 54)
    parts = [
        *_states(timeline.spans, shown, across, row),
        label(_LEFT, 18, title, font_weight="bold"),
        element("path", d=f"M{_LEFT} {_TOP}V{bottom:.2f}H{_RIGHT}{borders}", class_="axis"),
        *(label(across(value), bottom + 16, short(value), "middle faint") for value in across.ticks(10)),
        *(label(_LEFT - 6, _TOP + row * (sm + 0.5) + 4, str(sm), "end faint") for sm in _rows(timeline.sms)),
        label(_LEFT, bottom + 34, began, "faint"),
        *lines,
        *_legend(timeline, shown, end + 24),
    ]
    return picture(WIDTH, end + 124, title, parts)


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


def _states(spans: Sequence[TaskSpan], shown: Window, across: PlotAxis, row: float) -> list[str]:
    """A path for each state. Of idle SMs one sees the paper."""
    gap = 0.5 if row > 3 else 0.0
    drawn: dict[State, list[tuple[float, float, float]]] = {state: [] for state in MEANINGS}
    for span in spans:
        if span.end_us > shown.start_us and span.came_us < shown.end_us:
            for state, start, end in span.stretches():
                left, right = max(start, shown.start_us), min(end, shown.end_us)
                if left < right:
                    x = across(left - shown.start_us)
                    length = across(right - shown.start_us) - x
                    drawn[state].append((x, _TOP + row * (span.sm + 0.5) - gap / 2, length))
    return [
        element("path", tip(f"{state}: {MEANINGS[state]}"), d=strokes(lines), stroke_width=row - gap,
                class_=f"state {state}")
        for state, lines in drawn.items() if lines
    ]  # fmt: skip


def _operations(shown: Window, across: PlotAxis, top: float) -> tuple[list[str], float]:
    """(a line from the first start to the last end of each operation, with its name; the height of their end)."""
    parts = []
    for order, (name, spans) in enumerate(shown.names.items()):
        y = top + _BAR * order
        ends = (min(span.start_us for span in spans), max(span.end_us for span in spans))
        left, right = (across(time - shown.start_us) for time in ends)
        said = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
        parts.append(element("path", d=polyline([(left, y), (right, y)]), class_="runs"))
        if right + _LETTER * len(said) + 8 < WIDTH:
            parts.append(label(right + 6, y + 4, said, "halo"))
        else:
            parts.append(label(max(_LETTER * len(said), left - 6), y + 4, said, "end halo"))
    return parts, top + _BAR * len(shown.names)


def _rows(sms: int) -> list[int]:
    step = max(1, sms // 8)
    return list(range(0, sms, step))


def _a(place: str) -> str:
    return f"an {place}" if place == "SM" else f"a {place}"


def _legend(timeline: Timeline, shown: Window, y: float) -> list[str]:
    """The states with their shares, in two columns at the left, where a narrow screen shows them first."""
    here, step = window_states(timeline, shown), step_states(timeline)
    whole = " (of the whole step)" if shown.layer is not None else ""
    parts = [
        label(_LEFT, y, f"share of the picture{whole}", "faint"),
        label(_LEFT, y + 88, "within a task, summed: stage, starve, multiply, other", "faint"),
    ]
    for place, state in enumerate(MEANINGS):
        x, line = _LEFT + place // 3 * 230, y + 22 + place % 3 * 22
        share = f"{state} {here[state]:.1%}" + (f" ({step[state]:.1%})" if shown.layer is not None else "")
        parts.append(element("rect", x=x, y=line - 11, width=13, height=13, class_=f"swatch {state}"))
        parts.append(label(x + 20, line, share))
    return parts
