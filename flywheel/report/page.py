"""The report: one HTML page that loads nothing else, and the same pictures as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from flywheel.ir.show import markup as words
from flywheel.measure.latency import band_of, rounded, tokens_per_s
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import disturbed, judged, marks, ranked, row_name
from flywheel.report.changes import Change, changes
from flywheel.report.facts import Facts, Knobs
from flywheel.report.history import MOST_TIMES, history, shown
from flywheel.report.knobs import MOST_AXES, MOST_LINES, coordinates, costs, weighty
from flywheel.report.layer import MEANINGS, layer, shares, step_states, window, window_states
from flywheel.report.svg import STYLE, element, standalone
from flywheel.search.gains import gains_in_words

SHOWN: Final = 10
"""How many best trials, and how many reasons of failures, the page lists."""

_CSS: Final = (
    ":root{color-scheme:light dark;--ink:#1d2733;--paper:#fff;--faint:#5b6875;--box:#f4f6f8}"
    "@media(prefers-color-scheme:dark){:root{--ink:#dde3ea;--paper:#12171d;--faint:#9aa7b4;--box:#1c232b}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:980px;margin:2rem auto;"
    "padding:0 1rem}h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2.2rem}"
    "svg{width:100%;min-width:44rem;max-width:60rem;height:auto}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:2px 14px 2px 0;text-align:left;vertical-align:top}td{max-width:46rem}"
    "td.n,th.n{text-align:right;white-space:nowrap}p.note{color:var(--faint)}summary{cursor:pointer}"
    "pre{background:var(--box);padding:.8rem;overflow-x:auto;font-size:12px}"
    ".tiles{display:flex;flex-wrap:wrap;gap:2.4rem;margin:1rem 0}.tiles b{display:block;font-size:1.35rem}"
    ".kind{border:1px solid;border-radius:4px;padding:1px 8px;font-size:13px}"
)
_PREDICTED: Final = "Predicted by the cost model (version {}), not measured."
_COLUMNS: Final = (
    "flywheel_version", "ir_version", "commit", "python", "optuna", "host", "gpu_name", "gpu_driver", "nvrtc",
    "kernels",
)  # fmt: skip


def page(facts: Facts, schedule_json: str | None, command: str) -> str:
    """The whole page. The same facts give the same bytes.

    `command` is the line that runs the campaign again. `schedule_json` is the best trial's exported schedule; None
    where no trial has a latency.
    """
    title = f"{facts.campaign.name}: flywheel"
    body = [
        *_head(facts),
        *_history(facts),
        *_outcomes(facts.trials),
        *_knobs(facts),
        *_layer(facts),
        *_best(facts, schedule_json),
        *_origin(facts, command),
    ]
    head = element("meta", charset="utf-8") + element("meta", name="viewport", content="width=device-width")
    head += element("title", words(title)) + element("style", _CSS + STYLE)
    return "<!doctype html>\n" + element("html", element("head", head), element("body", *body), lang="en") + "\n"


def pictures(facts: Facts) -> dict[str, str]:
    """Each picture that the facts allow, as an SVG file by name."""
    drawn = {
        "history": history(facts.records),
        "costs": _costs(facts),
        **_coordinates(facts),
        "layer": layer(facts.schedule) if facts.schedule else None,
    }
    return {f"{name}.svg": standalone(drawing) for name, drawing in drawn.items() if drawing is not None}


def _head(facts: Facts) -> list[str]:
    campaign, best = facts.campaign, facts.best
    work = f"{campaign.work}, sampler {campaign.sampler}"
    tiles = []
    step = "token" if campaign.batch == 1 else "step"
    kind = "nothing feasible"
    notes = []
    if facts.known is not None:
        tiles.append(("the answer, measured", f"{facts.known.latency_us:,.1f} us a {step}"))
        notes.append(
            f"{facts.known.words[0].upper()}{facts.known.words[1:]} is the answer: it was measured, on "
            f"{facts.known.measured_on}. A prediction does not replace a measurement."
        )
    if best is not None and best.objective_us is not None:
        kind = "predicted by a cost model" if best.is_predicted else f"measured on {best.gpu_name or campaign.gpu}"
        kind += f", imported from {best.imported_from}" if best.is_imported else ""
        rate = tokens_per_s(best.objective_us, campaign.batch)
        tiles.append(("best, " + best.kind, f"{best.took_us} us a {step}"))
        tiles.append(("tokens a second", rounded(rate) if best.is_predicted else f"{rate:,.0f}"))
        if best.is_predicted:
            band = band_of(campaign.gpu, best.predictor or "")
            low, high = (rounded(end) for end in band.around(best.objective_us))
            tiles.append(("us where it is measured, perhaps", f"{low} to {high}"))
            notes.append(f"The range: {band.why}.")
        if best.floor_us is not None:
            tiles.append(("weight floor", f"{best.floor_us:,.1f} us"))
        if best.floor_fraction is not None:
            tiles.append(("of the floor", f"{best.floor_fraction:.1%}"))
    tiles.append(("trials", f"{len(facts.trials):,}"))
    gains = None if facts.gains is None else gains_in_words(facts.gains)
    notes += [] if gains is None else [f"Searching gained {gains}."]
    notes += [] if best is None or best.is_predicted else _certainty(best, facts.tied, facts.records)
    colour = "failed" if best is None else best.outcome
    return [
        element("h1", words(campaign.name)),
        element("p", words(work), " ", element("span", words(kind), class_=f"kind {colour}")),
        element("div", *(element("div", element("b", words(v)), words(n)) for n, v in tiles), class_="tiles"),
        *map(_note, notes),
    ]


def _certainty(best: TrialRecord, tied: Sequence[TrialRecord], records: Sequence[TrialRecord]) -> list[str]:
    """How certain it is that a measured row is the best, and what disturbed its measurement."""
    said = []
    if best.source != "final":
        said.append("No final was held: these trials were measured at different times, so their order may be chance.")
    elif tied:
        others = ", ".join(f"{row_name(record, records)} ({record.latency_us:,.1f} us)" for record in tied)
        said.append(f"Tied with {others}: the difference is within the noise of the final.")
    elif best.gain_low_us is not None:
        least, most = best.gain_low_us, best.gain_high_us
        said.append(f"In the final it took {least:,.2f} to {most:,.2f} us less than the next (99 % interval).")
    disturbance, verdict = disturbed(best), judged(best)
    if disturbance is not None:
        said.append(f"While it was measured, the GPU's clocks were held down or others computed on it: {disturbance}.")
    if verdict is not None:
        said.append(f"Judged beside the oracle: {verdict}.")
    return said


def _history(facts: Facts) -> list[str]:
    drawn, what = history(facts.records), shown(facts.records)
    if drawn is None or what is None:
        return [_section("History"), _note("No trial has a latency.")]
    said = []
    if what.predicted:
        said.append("Hollow blue: predicted by the cost model.")
    if what.measured:
        said.append("Full orange: measured on a GPU.")
    if what.seeds:
        said.append("Squares: schedules that were known before.")
    if what.finals:
        said.append("Diamonds: the best of them, measured again in turn, from the 10th to the 90th percentile.")
    said.append("The line is the best so far; a trial within the noise of it does not move it.")
    if what.above:
        count, above = len(what.above), f"above {what.limit_us:,.0f} us, {MOST_TIMES:g} times the best,"
        said.append(
            f"1 trial {above} is a triangle at the upper edge."
            if count == 1
            else f"{count:,} trials {above} are triangles at the upper edge."
        )
    if what.floor_us is not None:
        said.append("Dashed: no schedule can be faster than the floor, the weights' bytes over the memory's bandwidth.")
    return [_section("History"), _note(" ".join(said)), _drawing(drawn)]


def _outcomes(trials: Sequence[TrialRecord]) -> list[str]:
    if not trials:
        return []
    reasons = Counter(record.reason for record in trials if record.reason is not None)
    rows = [(f"{count:,}", reason) for reason, count in reasons.most_common(SHOWN)]
    table = [_table(("trials", "reason"), rows, numbers=(0,))] if rows else []
    counts = Counter(record.outcome for record in trials)
    said = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in counts.most_common())
    return [_section("Outcomes"), _note(f"{said}."), *table]


def _knobs(facts: Facts) -> list[str]:
    if facts.knobs is None:
        return [_section("Knobs"), _note(f"Not known: {facts.missing}")]
    bars, lines = _costs(facts), _coordinates(facts)
    cut = f" Only the best {MOST_LINES:,} are drawn." if len(facts.trials) > MOST_LINES else ""
    parts = [
        _section("What a knob can cost"),
        _note("How much longer the best trial with the knob's worst tried value took than the best of all trials, "
              "whatever else it changed. A table below has every value.")
        if bars
        else _note("Too few trials to tell."),
        _drawing(bars) if bars else "",
        _section("Knobs and latency"),
    ]  # fmt: skip
    if not lines:
        return [*parts, _note("No trial of the space has a latency.")]
    most = f"The {MOST_AXES} knobs that mattered most, from the left. " if "coordinates_rest" in lines else ""
    said = f"{most}A line is a trial, stronger where faster; the best is orange.{cut}"
    parts += [_note(said), _drawing(lines["coordinates"])]
    if "coordinates_rest" in lines:
        parts.append(element("details", element("summary", "the other knobs"), _drawing(lines["coordinates_rest"])))
    return [*parts, *_changes(facts.knobs, facts)]


def _costs(facts: Facts) -> str | None:
    if facts.knobs is None or facts.best is None:
        return None
    return costs(changes(facts.knobs, facts.trials, facts.best))


def _coordinates(facts: Facts) -> dict[str, str]:
    """The pictures of knobs and latency, by name: one of the knobs that mattered most, and one of the others."""
    if facts.knobs is None:
        return {}
    names = ("coordinates", "coordinates_rest")
    drawn = {
        name: coordinates(facts.knobs, axes, facts.trials, facts.best)
        for name, axes in zip(names, weighty(facts.knobs, facts.trials), strict=True)
        if axes
    }
    return {name: drawing for name, drawing in drawn.items() if drawing is not None}


def _changes(knobs: Knobs, facts: Facts) -> list[str]:
    found = changes(knobs, facts.trials, facts.best) if facts.best is not None else []
    if not found:
        return []
    most = {axis.name for axis in weighty(knobs, facts.trials)[0]}
    rest = [each for each in found if each.knob not in most]
    alone = any(each.alone_us is not None for each in found)
    said = "No trial differs from the best in one knob alone."
    if alone:
        said = "Only that: the trial that differs from the best in this knob alone; empty where none does."
    return [
        _section("What a change costs"),
        _note(f"Difference to the best trial's latency. {said} At best: the fastest trial with that value, whatever "
              "else it changed."),
        _changed([each for each in found if each.knob in most], alone),
        element("details", element("summary", "the other knobs"), _changed(rest, alone)) if rest else "",
    ]  # fmt: skip


def _changed(found: Sequence[Change], alone: bool) -> str:
    """The table of changes, with a column for changes of one knob alone if any trial made one."""
    headers = ("knob", "best", "instead", *(["only that, us"] if alone else []), "at best, us", "trials")
    rows = [
        (each.knob, str(each.best), str(each.value), *([_cost(each.alone_us)] if alone else []), _cost(each.least_us),
         f"{each.trials:,}")
        for each in found
    ]  # fmt: skip
    return _table(headers, rows, numbers=range(3, len(headers)))


def _cost(us: float | None) -> str:
    return "" if us is None else f"{us:+,.1f}"


def _layer(facts: Facts) -> list[str]:
    title = _section("The best schedule on every SM")
    schedule = facts.schedule
    if schedule is None:
        return [] if facts.knobs is None else [title, _note(f"Not shown: {facts.missing}")]
    here, step = window_states(schedule, window(schedule)), step_states(schedule)
    states = [(state, f"{here[state]:.1%}", f"{step[state]:.1%}", said) for state, said in MEANINGS.items()]
    rows = [(each.operation, f"{each.tasks:,}", f"{each.time_share:.1%}") for each in shares(schedule)]
    return [
        title,
        _note(f"{_PREDICTED.format(schedule.predictor)} {rounded(schedule.prediction.latency_us)} us a step."),
        _drawing(layer(schedule)),
        _table(("an SM", "in the picture", "in the step", "what it does"), states, numbers=(1, 2)),
        _table(("operation", "tasks", "SM time"), rows, numbers=(1, 2)),
    ]


def _best(facts: Facts, schedule_json: str | None) -> list[str]:
    rows = [
        (str(r.trial), r.took_us, r.outcome, _percent(r.floor_fraction), r.source, r.config_id,
         r.program_id or "", marks(r) or "")
        for r in ranked(facts.records)[:SHOWN]
    ]  # fmt: skip
    headers = ("trial", "us", "", "of floor", "from", "config", "program", "")
    parts = [_section("Best trials"), _table(headers, rows, numbers=(0, 1, 3)) if rows else ""]
    if facts.knobs is not None and facts.knobs.best is not None:
        first = facts.knobs.first
        compared = [(name, str(value), str(first[name])) for name, value in facts.knobs.best.items()]
        parts += [_section("The best schedule's knobs"), _table(("knob", "best", "known good"), compared)]
    if schedule_json is not None:
        said = element("pre", words_of_lines(schedule_json))
        parts.append(element("details", element("summary", "best schedule, as flywheel export writes it"), said))
    return parts


def words_of_lines(text: str) -> str:
    """Several lines as markup."""
    return "\n".join(words(line) for line in text.splitlines())


def _origin(facts: Facts, command: str) -> list[str]:
    parts = [_section("Where this comes from"), element("pre", words_of_lines(command))]
    if facts.records:
        first, last = facts.records[0], facts.records[-1]
        known = [(name, {str(getattr(r, name)): None for r in facts.records if getattr(r, name)}) for name in _COLUMNS]
        rows = [(name, ", ".join(list(values)[:SHOWN])) for name, values in known if values]
        parts.append(_table(("", ""), [("trials from", first.created_at), ("to", last.created_at), *rows]))
    spec = json.dumps(json.loads(facts.campaign.spec), indent=2, sort_keys=True)
    return [*parts, element("details", element("summary", "campaign"), element("pre", words_of_lines(spec)))]


def _section(title: str) -> str:
    return element("h2", words(title))


def _note(text: str) -> str:
    return element("p", words(text), class_="note")


def _drawing(svg: str) -> str:
    """A picture in a box that scrolls where the page is narrow, so that its text stays large enough to read."""
    return element("div", svg, class_="wide")


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        sides = ["n" if at in numbers else None for at in range(len(cells))]
        return element("tr", *(element(kind, words(c) or " ", class_=s) for c, s in zip(cells, sides, strict=True)))

    head = [line("th", headers)] if any(headers) else []
    return element("div", element("table", *head, *(line("td", row) for row in rows)), class_="wide")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
