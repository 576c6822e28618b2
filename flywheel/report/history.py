"""A picture of a campaign's trials: their latencies in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.measure.latency import rounded
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import incumbents, trials_of
from flywheel.report.svg import PlotAxis, dots, element, label, picture, polyline, short, tip

WIDTH: Final = 960.0
MOST_TIMES: Final = 1.1
"""A trial that takes longer than this many times the best is drawn at the upper edge. To scale, it would hide what the
search gained."""
_LEAST_TIMES: Final = 0.88
"""A floor below this many times the best is not drawn, for the same reason."""

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 384.0, 78.0, 940.0, 60.0, 324.0
_LEGEND: Final = (18.0, 40.0)
"""Heights of its two lines."""

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class HistoryView:
    """The content of a history: (trial, us) of each kind and of the schedules that were known before (`seeds`), the
    rows of the finals, the trials that have no latency (`failed`), and the trials above `limit_us`. The floor is None
    where it is unknown or far below, and `answer_us`, a measured latency that these rows only predict, where there is
    none or it is far above."""

    measured: Points
    predicted: Points
    seeds: Points
    finals: list[TrialRecord]
    failed: list[int]
    floor_us: float | None
    limit_us: float
    answer_us: float | None
    per: str

    @property
    def limit_in_words(self) -> str:
        """`limit_us`, with no more digits than the edge of a picture needs."""
        return rounded(self.limit_us)

    @property
    def above(self) -> Points:
        """The points above `limit_us`."""
        return [point for point in (*self.measured, *self.predicted) if point[1] > self.limit_us]


def shown(records: Sequence[TrialRecord], answer_us: float | None = None) -> HistoryView | None:
    """The content of these rows' history; None where no row has a latency. `answer_us` is the measured latency of the
    schedule that answers a search which only predicted."""
    trials = trials_of(records)
    measured = [(r.trial, r.latency_us) for r in trials if r.latency_us is not None]
    predicted = [(r.trial, r.predicted_us) for r in trials if r.predicted_us is not None]
    seeds = [(r.trial, r.objective_us) for r in trials if r.source == "seed" and r.objective_us is not None]
    finals = [r for r in records if r.source == "final"]
    again = [(r.trial, r.latency_us) for r in finals if r.latency_us is not None]
    best = [min(us for _, us in points) for points in (measured + again, predicted) if points]
    if not best:
        return None
    failed = [record.trial for record in trials if record.objective_us is None]
    floors = [record.floor_us for record in records if record.floor_us is not None]
    floor_us = min(floors, default=0.0)
    drawn = floor_us if floor_us >= _LEAST_TIMES * min(best) else None
    limit_us, per = MOST_TIMES * max(best), "token" if records[0].batch == 1 else "step"
    answer = answer_us if answer_us is not None and _LEAST_TIMES * min(best) <= answer_us <= limit_us else None
    return HistoryView(measured, predicted, seeds, finals, failed, drawn, limit_us, answer, per)


def history(records: Sequence[TrialRecord], answer_us: float | None = None) -> str | None:
    """A picture of the latencies of trials and finals, the best so far, the weight floor, and the answer as in `shown`;
    None where no row has a latency."""
    what = shown(records, answer_us)
    if what is None:
        return None
    ends = [us for r in what.finals for us in (r.p10_us, r.p90_us) if us is not None]
    values = [*(us for _, us in (*what.measured, *what.predicted)), *ends]
    values += [] if what.answer_us is None else [what.answer_us]
    lowest = min(values if what.floor_us is None else [what.floor_us, *values])
    highest = min(max(values), what.limit_us)
    across = PlotAxis(-0.5, max(record.trial for record in records) + 0.5, _LEFT, _RIGHT)
    up = PlotAxis(lowest * 0.985, max(highest, lowest * 1.01) * 1.02, _BOTTOM, _TOP, log=True)
    parts = [*_frame(across, up, what.per), *_levels(what, up), *_failures(what, across), *_above(what, across)]
    for kind, points in (("measured", what.measured), ("predicted", what.predicted)):
        places = [(across(trial), up(us)) for trial, us in points if us <= what.limit_us]
        if places:
            parts += _points(places, kind)
    marks = "".join(_square(across(trial), up(us)) for trial, us in what.seeds if us <= what.limit_us)
    parts += [element("path", d=marks, class_="ink", fill="none")] if marks else []
    for record in what.finals:
        parts += _again(record, across, up, what.limit_us)
    firsts = incumbents(records)
    for kind in ("measured", "predicted"):
        parts += _best([r for r in firsts if r.outcome == kind], kind, across, up, what.limit_us)
    marked = Counter(r.outcome for r in firsts if r.objective_us is not None and r.objective_us <= what.limit_us)
    return picture(WIDTH, _HEIGHT, "Latency of every trial", [*parts, *_legend(what, marked)])


def _frame(across: PlotAxis, up: PlotAxis, per: str) -> list[str]:
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
        label(14, (_TOP + _BOTTOM) / 2, f"us a {per}, log scale", "middle faint", transform=turn),
    ]


def _levels(what: HistoryView, up: PlotAxis) -> list[str]:
    """The floor and the answer, as level lines."""
    levels = (("floor", what.floor_us, "6 4"), ("measured answer", what.answer_us, "2 4"))
    return [
        element("path", d=polyline([(_LEFT, up(us)), (_RIGHT, up(us))]), stroke="currentColor", stroke_width=1.5,
                stroke_dasharray=dashes, fill="none", class_=kind)
        for kind, us, dashes in levels
        if us is not None
    ]  # fmt: skip


def _failures(what: HistoryView, across: PlotAxis) -> list[str]:
    """Trials without a latency, as ticks on the axis."""
    marks = "".join(polyline([(across(trial), _BOTTOM - 8), (across(trial), _BOTTOM)]) for trial in what.failed)
    if not marks:
        return []
    return [element("path", d=marks, stroke="currentColor", stroke_width=1.5, fill="none", class_="failed")]


def _above(what: HistoryView, across: PlotAxis) -> list[str]:
    """Trials above the upper edge, as triangles on it."""
    marks = "".join(_triangle(across(trial), _TOP) for trial, _ in what.above)
    return [element("path", d=marks, fill="currentColor", class_="failed above")] if marks else []


def _triangle(x: float, y: float) -> str:
    return f"M{x - 4.5:.2f} {y:.2f}l4.5 -7 4.5 7z"


def _points(places: list[tuple[float, float]], kind: str) -> list[str]:
    """Points of one kind: full where measured, hollow where predicted."""
    path = dots(places)
    size = 6.0 if len(places) <= 1000 else 3.0
    outer = element("path", d=path, stroke="currentColor", stroke_width=size, stroke_linecap="round", class_=kind)
    if kind == "measured":
        return [outer]
    return [outer, element("path", d=path, class_="rim", stroke_width=size - 2.4, stroke_linecap="round")]


def _square(x: float, y: float) -> str:
    return f"M{x - 5:.2f} {y - 5:.2f}h10v10h-10z"


def _again(record: TrialRecord, across: PlotAxis, up: PlotAxis, limit_us: float) -> list[str]:
    """A final's diamond, and a line from its 10th to its 90th percentile."""
    x, median_us, low_us, high_us = across(record.trial), record.latency_us, record.p10_us, record.p90_us
    if median_us is None or median_us > limit_us:
        return []
    spread = [] if low_us is None or high_us is None else [(x, up(low_us)), (x, up(min(high_us, up.high)))]
    line = [element("path", d=polyline(spread), stroke="currentColor", class_="final")] if spread else []
    return [*line, _final(x, up(median_us))]


def _final(x: float, y: float) -> str:
    """A diamond for a final, which measured a program again."""
    corners = f"M{x:.2f} {y:.2f}m0 -5l5 5l-5 5l-5 -5z"
    return element("path", d=corners, stroke="currentColor", stroke_width=1.6, class_="final paper")


def _best(incumbents: list[TrialRecord], kind: str, across: PlotAxis, up: PlotAxis, limit_us: float) -> list[str]:
    """The best latency so far as a staircase, with a mark and its numbers at each step.

    A staircase that begins above the upper edge enters from there.
    """
    stairs: list[tuple[float, float]] = []
    marks = []
    for record in incumbents:
        assert record.objective_us is not None
        x, y = across(record.trial), up(min(record.objective_us, up.high))
        stairs += [(x, stairs[-1][1]), (x, y)] if stairs else [(x, y)]
        if record.objective_us > limit_us:
            continue
        fraction = "" if record.floor_fraction is None else f", {record.floor_fraction:.1%} of the floor"
        said = tip(f"{record.title}: {kind} {record.took_us} us{fraction}; config {record.config_id}")
        marks.append(element("g", _new_best(x, y, said), class_=kind))
    if not stairs:
        return []
    stairs.append((across.end, stairs[-1][1]))
    line = element("path", d=polyline(stairs), stroke="currentColor", stroke_width=2, fill="none", class_=kind)
    return [line, *marks]


def _new_best(x: float, y: float, *said: str) -> str:
    return element("circle", *said, cx=x, cy=y, r=5.5, fill="currentColor", stroke_width=2, class_="ink")


def _legend(what: HistoryView, marked: Mapping[str, int]) -> list[str]:
    """The legend of the marks in the picture, with the number of new bests that are `marked` by kind. It takes a second
    line where the first is full."""
    told = [("measured", f"measured: {_trials(what.measured)}")] if what.measured else []
    told += [("predicted", f"predicted: {_trials(what.predicted)}")] if what.predicted else []
    told += [(f"best {kind}", f"new best {kind}: {count:,}") for kind, count in marked.items()]
    told += [("seed", f"known before: {len(what.seeds):,}")] if what.seeds else []
    told += [("final", f"measured again in finals: {len(what.finals):,}")] if what.finals else []
    told += [("failed", f"no latency: {_trials(what.failed)}")] if what.failed else []
    if what.above:
        worst = max(us for _, us in what.above)
        told.append(("above", f"above {what.limit_in_words} us: {len(what.above):,}, up to {rounded(worst)} us"))
    told += [("floor", f"weight floor, {what.floor_us:,.1f} us")] if what.floor_us is not None else []
    told += [("answer", f"the answer, measured: {what.answer_us:,.1f} us")] if what.answer_us is not None else []
    parts, x, line = [], _LEFT, 0
    for kind, text in told:
        width = 40 + 6.6 * len(text)
        if x + width - 20 > _RIGHT and line == 0:
            x, line = _LEFT, 1
        parts += [_sign(kind, x + 5, _LEGEND[line]), label(x + 17, _LEGEND[line] + 4, text)]
        x += width
    return parts


def _trials(them: Sequence[object]) -> str:
    return "1 trial" if len(them) == 1 else f"{len(them):,} trials"


def _sign(kind: str, x: float, y: float) -> str:
    """A kind's mark, beside its word."""
    match kind:
        case "final":
            return _final(x, y)
        case "seed":
            return element("path", d=_square(x, y), class_="ink", fill="none")
        case "floor":
            dashes = f"M{x - 9:.2f} {y:.2f}h17"
            return element("path", d=dashes, stroke="currentColor", stroke_dasharray="5 3", class_=kind)
        case "answer":
            d = f"M{x - 9:.2f} {y:.2f}h17"
            return element("path", d=d, stroke="currentColor", stroke_dasharray="2 4", class_="measured")
        case "failed":
            return element("path", d=f"M{x:.2f} {y - 4:.2f}v8", stroke="currentColor", stroke_width=1.5, class_=kind)
        case "above":
            return element("path", d=_triangle(x, y + 4), fill="currentColor", class_="failed")
        case "best measured" | "best predicted":
            return element("g", _new_best(x, y), class_=kind.removeprefix("best "))
        case "predicted":
            ring = element("circle", cx=x, cy=y, r=4, stroke="currentColor", stroke_width=2, class_="paper")
            return element("g", ring, class_=kind)
        case _:
            return element("circle", cx=x, cy=y, r=4, fill="currentColor", class_=kind)
