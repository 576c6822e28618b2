"""Pictures of the searched knobs: what each can cost, and the latencies of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flywheel.ir.show import markup as words
from flywheel.measure.latency import RESOLUTION, difference
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import compared
from flywheel.report.changes import Change, by_cost, costliest
from flywheel.report.facts import Knobs
from flywheel.report.history import MOST_TIMES, WIDTH
from flywheel.report.svg import PlotAxis, element, label, picture, polyline, short, tip
from flywheel.search.knobs import Choice
from flywheel.search.space import Dimension

MOST_LINES: Final = 1000
MOST_AXES: Final = 12
"""Most axes of one picture; more are hard to read."""
RAMP: Final = ("f1", "f2", "f3", "f4", "f5")
"""Classes of lines, from the slowest fifth of the trials to the fastest."""

_TOP, _BOTTOM, _LEFT = 96.0, 400.0, 40.0
_NARROW, _ROW = 400.0, 32.0
"""Width of the picture of costs, so that a phone shows all of it, and height of a bar with its words."""
_CHARACTER: Final = 6.0
"""Width of a small character, rounded up."""


def costs(found: Sequence[Change], best: TrialRecord) -> str | None:
    """A picture with a bar for each knob: the most that another value of it costs where nothing else changes, the most
    costly knob first; None where none costs anything."""
    least = RESOLUTION * (best.objective_us or 0.0) if best.is_predicted else 0.0
    most = [(change, us) for change in costliest(found).values() if (us := change.alone_us or 0.0) > least]
    if not most:
        return None
    parts = []
    for row, (change, us) in enumerate(most):
        y, length = 8.0 + row * _ROW, us / most[0][1] * (_NARROW - 8)
        knob, said = change.knob, f"{cost(us, best)} us with {change.value} instead of {change.best}"
        parts += [
            label(4, y + 10, knob),
            label(_NARROW - 4, y + 10, said, "end faint"),
            element("rect", tip(f"{knob}: {said}"), x=4, y=y + 15, width=length, height=9, fill="currentColor",
                    class_="bar"),
        ]  # fmt: skip
    return picture(_NARROW, 12.0 + _ROW * len(most), "What a knob can cost", parts)


def cost(us: float | None, best: TrialRecord) -> str:
    """A difference in us to the best latency, with no more digits than it has; empty without one."""
    if us is None:
        return ""
    return difference(us, best.objective_us or 0.0) if best.is_predicted else f"{us:+,.1f}"


def weighty(knobs: Knobs, found: Sequence[Change]) -> tuple[list[Dimension], list[Dimension]]:
    """The knobs that can cost most, the most costly first, and the other knobs."""
    ordered = by_cost(knobs, found)
    return ordered[:MOST_AXES], ordered[MOST_AXES:]


def coordinates(
    knobs: Knobs, axes: Sequence[Dimension], trials: Sequence[TrialRecord], best: TrialRecord | None
) -> str | None:
    """A picture with an axis for each knob of `axes`, one for the latency, and a line for each trial, the best in
    front.

    None if there is no line to draw. The line of a trial that takes more than MOST_TIMES the best ends at the upper
    edge.
    """
    kind = compared(trials)
    ranked = sorted(
        (
            (record.objective_us, record.trial, choice)
            for record, choice in zip(trials, knobs.choices, strict=True)
            if record.outcome == kind and record.objective_us is not None and choice is not None
        ),
        key=lambda entry: (-entry[0], -entry[1]),
    )[-MOST_LINES:]
    if not axes or not ranked:
        return None
    step = (WIDTH - _LEFT - 60) / len(axes)
    places = [_LEFT + step * number for number in range(len(axes) + 1)]
    ends = [ranked[0][0], ranked[-1][0]]
    ends += [best.objective_us] if best is not None and best.objective_us is not None else []
    slowest, fastest = min(max(ends), MOST_TIMES * min(ends)), min(ends)
    up = PlotAxis(fastest, slowest if slowest > fastest else fastest * 1.01, _BOTTOM, _TOP, log=True)
    fifths: list[list[str]] = [[] for _ in RAMP]
    for rank, (latency, _, choice) in enumerate(ranked):
        line = polyline([*_line(axes, places, choice), (places[-1], up(min(latency, slowest)))])
        fifths[rank * len(RAMP) // len(ranked)].append(line)
    chosen = None
    if best is not None and best.objective_us is not None and knobs.best is not None:
        chosen = polyline([*_line(axes, places, knobs.best), (places[-1], up(min(best.objective_us, slowest)))])
    parts = [
        element("path", d="".join(lines), stroke="currentColor", stroke_opacity=0.55, fill="none", class_=fifth)
        for fifth, lines in zip(RAMP, fifths, strict=True)
        if lines
    ]
    if chosen is not None:
        parts.append(element("path", d=chosen, stroke="currentColor", stroke_width=2.5, fill="none", class_="measured"))
    for dimension, x in zip(axes, places, strict=False):
        parts += _axis(dimension, x, int(step / _CHARACTER))
    parts += [
        element("path", d=f"M{places[-1]} {_TOP}V{_BOTTOM}", class_="axis"),
        _name(places[-1], "latency, us"),
        *(label(places[-1] + 6, up(value) + 4, short(value), "faint", font_size=10) for value in up.ticks(5)),
    ]
    return picture(WIDTH, _BOTTOM + 16, "Knobs and latency of every trial", parts)


def _line(axes: Sequence[Dimension], places: Sequence[float], choice: Choice) -> list[tuple[float, float]]:
    return [(x, _height(axis, axis.values.index(choice[axis.name]))) for axis, x in zip(axes, places, strict=False)]


def _height(dimension: Dimension, index: int) -> float:
    return _BOTTOM - index / (len(dimension.values) - 1) * (_BOTTOM - _TOP)


def _axis(dimension: Dimension, x: float, most: int) -> list[str]:
    """An axis with its values. Names are cut to `most` characters."""
    texts = [(str(value), _height(dimension, index) - 3) for index, value in enumerate(dimension.values)]
    values = [
        element("text", tip(text), words(text if len(text) <= most else text[: most - 1] + "…"), x=x + 3, y=y,
                class_="faint halo", font_size=10)
        for text, y in texts
    ]  # fmt: skip
    return [element("path", d=f"M{x:.2f} {_TOP}V{_BOTTOM}", class_="axis"), _name(x, dimension.name), *values]


def _name(x: float, text: str) -> str:
    return label(x, _TOP - 14, text, transform=f"rotate(-38 {x:.2f} {_TOP - 14})", font_size=11)
