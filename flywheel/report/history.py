"""Pictures of a campaign's trials: their latencies one after the other, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from flywheel.measure.outcome import OUTCOME_NAMES
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import incumbents, trials_of
from flywheel.report.svg import Axis, dots, element, label, picture, polyline, short, tip

COLOURS: Final = {"predicted": "#4269a5", "measured": "#d9631e", "floor": "#b3123c", "failed": "#8a96a3",
                   "final": "#7a2f0a"}  # fmt: skip
"""Predicted and measured never share a colour."""
WIDTH: Final = 960.0

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360.0, 78.0, 940.0, 40.0, 300.0


def history(records: Sequence[TrialRecord]) -> str | None:
    """Latencies of trials and finals, the best so far, and the weight floor; None where nothing has a latency."""
    trials = trials_of(records)
    series = {
        "measured": [(r.trial, r.latency_us) for r in trials if r.latency_us is not None],
        "predicted": [(r.trial, r.predicted_us) for r in trials if r.predicted_us is not None],
    }
    finals = [(r.trial, r.latency_us) for r in records if r.source == "final" and r.latency_us is not None]
    values = [value for points in (*series.values(), finals) for _, value in points]
    if not values:
        return None
    floors = {record.floor_us for record in records if record.floor_us is not None}
    lowest = min([*floors, *values])
    across = Axis(-0.5, max(record.trial for record in records) + 0.5, _LEFT, _RIGHT)
    up = Axis(lowest * 0.985, max(max(values), lowest * 1.01) * 1.02, _BOTTOM, _TOP, log=True)
    parts = [*_frame(across, up), *_floor(floors, up), *_failures(records, across)]
    for kind, points in series.items():
        places = [(across(trial), up(value)) for trial, value in points]
        if places:
            parts += _points(places, kind)
    parts += [_final(across(trial), up(value)) for trial, value in finals]
    for kind in series:
        parts += _best([r for r in incumbents(records) if r.outcome == kind], kind, across, up)
    return picture(WIDTH, _HEIGHT, "Latency of every trial", [*parts, *_legend(trials, series, len(finals))])


def outcomes(trials: Sequence[TrialRecord]) -> str:
    """How many trials came to which end; finals are none."""
    counts = Counter(record.outcome for record in trials)
    shown = [name for name in OUTCOME_NAMES if counts[name]]
    most = max(counts.values(), default=1)
    parts = []
    for row, name in enumerate(shown):
        y = 22.0 + row * 26
        length = counts[name] / most * 640
        parts += [
            label(118, y + 4, name.replace("_", " "), "end"),
            element("rect", x=126, y=y - 8, width=length, height=16, fill=COLOURS.get(name, COLOURS["failed"])),
            label(132 + length, y + 4, f"{counts[name]:,} ({counts[name] / len(trials):.1%})", "faint"),
        ]
    return picture(WIDTH, 20.0 + 26 * max(1, len(shown)), "Outcomes", parts)


def _frame(across: Axis, up: Axis) -> list[str]:
    parts = [element("path", d=f"M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}", class_="axis")]
    for value in up.ticks(7):
        y = up(value)
        parts += [
            element("path", d=polyline([(_LEFT, y), (_RIGHT, y)]), class_="grid"),
            label(_LEFT - 6, y + 4, short(value), "end faint"),
        ]
    for value in across.ticks(10):
        if value >= 0 and value == round(value):
            parts.append(label(across(value), _BOTTOM + 18, short(value), "middle faint"))
    turn = f"rotate(-90 14 {(_TOP + _BOTTOM) / 2})"
    return [
        *parts,
        label((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "trial", "middle faint"),
        label(14, (_TOP + _BOTTOM) / 2, "us a token, by ratio", "middle faint", transform=turn),
    ]


def _floor(floors: set[float], up: Axis) -> list[str]:
    if not floors:
        return []
    floor = min(floors)
    y = up(floor)
    line = polyline([(_LEFT, y), (_RIGHT, y)])
    said = label(_RIGHT, 22, f"- - -  weight floor, {floor:,.1f} us", "end", style=f"fill:{COLOURS['floor']}")
    return [element("path", d=line, stroke=COLOURS["floor"], stroke_dasharray="6 4", fill="none", class_="floor"), said]


def _failures(records: Sequence[TrialRecord], across: Axis) -> list[str]:
    """Trials without a latency, as ticks on the axis."""
    failed = [across(record.trial) for record in records if record.objective_us is None]
    if not failed:
        return []
    marks = "".join(polyline([(x, _BOTTOM - 8), (x, _BOTTOM)]) for x in failed)
    return [element("path", d=marks, stroke=COLOURS["failed"], stroke_width=1.5, fill="none")]


def _points(places: list[tuple[float, float]], kind: str) -> list[str]:
    """Measured ones are full, predicted ones hollow."""
    path = dots(places)
    size = 6.0 if len(places) <= 1000 else 3.0
    outer = element("path", d=path, stroke=COLOURS[kind], stroke_width=size, stroke_linecap="round", class_=kind)
    if kind == "measured":
        return [outer]
    return [outer, element("path", d=path, stroke="#fff", stroke_width=size - 2.4, stroke_linecap="round")]


def _final(x: float, y: float) -> str:
    """A program that was measured again: a diamond."""
    corners = "".join(f"{step}" for step in ("m0 -5", "l5 5", "l-5 5", "l-5 -5", "z"))
    return element("path", d=f"M{x:.2f} {y:.2f}{corners}", fill="#fff", stroke=COLOURS["final"], stroke_width=1.6,
                   class_="final")  # fmt: skip


def _best(incumbents: list[TrialRecord], kind: str, across: Axis, up: Axis) -> list[str]:
    """The best so far as a staircase, and a mark with its numbers at each step of it."""
    stairs: list[tuple[float, float]] = []
    marks = []
    for record in incumbents:
        assert record.objective_us is not None
        x, y = across(record.trial), up(record.objective_us)
        stairs += [(x, stairs[-1][1]), (x, y)] if stairs else [(x, y)]
        fraction = "" if record.floor_fraction is None else f", {record.floor_fraction:.1%} of the floor"
        what = "final" if record.source == "final" else "trial"
        said = tip(f"{what} {record.trial}: {kind} {record.objective_us:,.1f} us{fraction}; config {record.config_id}")
        marks.append(element("circle", said, cx=x, cy=y, r=4.5, fill=COLOURS[kind], stroke="#fff"))
    if not stairs:
        return []
    stairs.append((across.end, stairs[-1][1]))
    return [element("path", d=polyline(stairs), stroke=COLOURS[kind], stroke_width=2, fill="none"), *marks]


def _legend(trials: Sequence[TrialRecord], series: dict[str, list[tuple[int, float]]], finals: int) -> list[str]:
    told = [(kind, f"{kind}: {len(points):,} trials") for kind, points in series.items() if points]
    failed = sum(record.objective_us is None for record in trials)
    told += [("failed", f"no latency: {failed:,} trials")] if failed else []
    told += [("final", f"measured again in finals: {finals:,}")] if finals else []
    parts, x = [], _LEFT
    for kind, text in told:
        hollow = kind == "predicted"
        fill = "#fff" if hollow else COLOURS[kind]
        mark = element("circle", cx=x + 5, cy=18, r=4, fill=fill, stroke=COLOURS[kind], stroke_width=2)
        parts.append(_final(x + 5, 18) if kind == "final" else mark)
        parts.append(label(x + 15, 22, text))
        x += 40 + 7 * len(text)
    return parts
