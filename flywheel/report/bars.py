"""Draws comparisons: each contestant's time as a bar, with lines for the time that reading the weights takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flywheel.measure.comparison import Comparison, Entry, standing
from flywheel.measure.outcome import outcome_name
from flywheel.report.svg import PlotAxis, element, label, picture, polyline, short, tip
from flywheel.rivals.lineup import dequantises, label_of

OURS_COLOUR: Final = "#d9631e"
RIVAL_COLOUR: Final = "#8a96a3"

_WIDTH, _LEFT, _RIGHT = 1030.0, 280.0, 790.0
_TOP, _ROW, _BAR, _HEADING, _AXIS = 48.0, 30.0, 18.0, 26.0, 44.0


def bars(title: str, comparisons: Sequence[Comparison], whole: str | None = None) -> str:
    """One group of bars for each comparison, on one axis that starts at 0. A line at each bar's end spans p10 to p90.
    `whole` is the type in which some contestants multiply the dequantised weights; None where no weights are quantised.

    A solid line marks the weights' time at the measured rate, a dashed line their time at the datasheet's rate.
    """
    times = [entry.latency.p90_us for each in comparisons for entry in each.entries if entry.latency is not None]
    longest = max([*times, *(each.ceiling_us for each in comparisons)])
    across = PlotAxis(0.0, longest * 1.02, _LEFT, _RIGHT)
    parts = [label(_LEFT, 20, title), *_legend()]
    y = _TOP
    groups = []
    for comparison in comparisons:
        height = _ROW * len(comparison.entries)
        groups.append(label(_LEFT, y + 16, f"context {comparison.context:,}, batch {comparison.batch}", "faint"))
        groups += _group(comparison, across, y + _HEADING, whole)
        y += _HEADING + height + 8
    for value in across.ticks(8):
        x = across(value)
        parts += [
            element("path", d=polyline([(x, _TOP), (x, y)]), class_="grid"),
            label(x, y + 18, short(value), "middle faint"),
        ]
    marked = whole is not None and any(dequantises(entry.name) for each in comparisons for entry in each.entries)
    said = f"us a step, median; ({whole}): with the dequantised weights" if marked else "us a step, median"
    parts += [*groups, label((_LEFT + _RIGHT) / 2, y + 36, said, "middle faint")]
    return picture(_WIDTH, y + _AXIS, title, parts)


def _group(comparison: Comparison, across: PlotAxis, top: float, whole: str | None) -> list[str]:
    bottom = top + _ROW * len(comparison.entries)
    parts = []
    for row, entry in enumerate(comparison.entries):
        name = label_of(entry.name) + (f" ({whole})" if whole is not None and dequantises(entry.name) else "")
        parts += _bar(comparison, entry, name, across, top + _ROW * row, OURS_COLOUR if row == 0 else RIVAL_COLOUR)
    for value, dashes in ((comparison.ceiling_us, None), (comparison.floor_us, "5 4")):
        line = polyline([(across(value), top - 4), (across(value), bottom)])
        said = tip(f"weights alone: {value:,.1f} us")
        parts.append(element("path", said, d=line, stroke="currentColor", stroke_dasharray=dashes, fill="none",
                             class_="floor"))
    return parts


def _bar(comparison: Comparison, entry: Entry, name: str, across: PlotAxis, top: float, colour: str) -> list[str]:
    middle = top + _ROW / 2
    named = label(_LEFT - 8, middle + 4, name, "end")
    found = standing(comparison, entry)
    if found is None:
        return [named, label(_LEFT + 6, middle + 4, f"{outcome_name(entry.outcome)}: not timed", "faint")]
    latency = found.latency
    said = tip(f"{name}, {entry.how}: {latency.median_us:,.1f} us, p10 {latency.p10_us:,.1f}, "
               f"p90 {latency.p90_us:,.1f}")  # fmt: skip
    end = across(latency.median_us)
    spread = polyline([(across(latency.p10_us), middle), (across(latency.p90_us), middle)])
    numbers = f"{latency.median_us:,.0f} us, {found.ceiling_fraction:.1%} of the read ceiling"
    return [
        named,
        element("rect", said, x=_LEFT, y=middle - _BAR / 2, width=end - _LEFT, height=_BAR, fill=colour),
        element("path", d=spread, class_="ink", stroke_width=2, fill="none"),
        label(max(end, across(latency.p90_us)) + 8, middle + 4, numbers, "halo"),
    ]


def _legend() -> list[str]:
    parts = []
    for x, dashes, text in (
        (_LEFT, None, "weights at the read rate measured in this run"),
        (_LEFT + 330, "5 4", "weights at the datasheet's bandwidth"),
    ):
        line = polyline([(x, 34), (x + 24, 34)])
        parts.append(element("path", d=line, stroke="currentColor", stroke_dasharray=dashes, fill="none",
                             class_="floor"))
        parts.append(label(x + 32, 38, text, "faint"))
    return parts
