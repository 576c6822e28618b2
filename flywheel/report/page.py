"""The report: one HTML page that loads nothing else, and the same pictures as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from flywheel.ir.show import markup as words
from flywheel.measure.floor import floor_fraction
from flywheel.measure.latency import RESOLUTION, band_of, rounded, tokens_per_s
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import disturbed, judged, marks, origin_of, ranked
from flywheel.report.changes import Change, changes, costliest
from flywheel.report.facts import Facts, Knobs
from flywheel.report.history import MOST_TIMES, history, shown
from flywheel.report.knobs import MOST_AXES, MOST_LINES, coordinates, cost, costs, weighty
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
    "svg{width:100%;min-width:44rem;max-width:60rem;height:auto}.narrow svg{min-width:0;max-width:36rem}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:2px 14px 2px 0;text-align:left;vertical-align:top}td{max-width:46rem}"
    "td:last-child:not(.n){min-width:11rem}"
    "td.n,th.n{text-align:right;white-space:nowrap}p.note{color:var(--faint)}summary{cursor:pointer}"
    "pre{background:var(--box);padding:.8rem;overflow-x:auto;font-size:12px}"
    ".tiles{display:flex;flex-wrap:wrap;gap:2.4rem;margin:1rem 0}.tiles b{display:block;font-size:1.35rem}"
    ".kind{border:1px solid;border-radius:4px;padding:1px 8px;font-size:13px}"
)
OUTSIDE: Final = "the best schedule sets what this version's search does not change"
"""Why nothing is known of the knobs of a best schedule outside the search space."""
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
        "history": history(facts.records, _answer_us(facts)),
        "costs": _costs(facts),
        **_coordinates(facts),
        "layer": layer(facts.schedule) if facts.schedule else None,
    }
    return {f"{name}.svg": standalone(drawing) for name, drawing in drawn.items() if drawing is not None}


def _head(facts: Facts) -> list[str]:
    campaign, best, known = facts.campaign, facts.best, facts.known
    work = f"{campaign.work}, sampler {campaign.sampler}"
    step = "token" if campaign.batch == 1 else "step"
    kind = "nothing feasible"
    notes = []
    if known is not None:
        notes.append(
            f"{known.words[0].upper()}{known.words[1:]} is the answer: it was measured, on {known.measured_on}. "
            "A prediction does not replace a measurement."
        )
    if best is not None and best.objective_us is not None:
        kind = "predicted by a cost model" if best.is_predicted else f"measured on {best.gpu_name or campaign.gpu}"
        kind += f", imported from {best.imported_from}" if best.is_imported else ""
        if best.is_predicted:
            band = band_of(campaign.gpu, best.predictor or "")
            said = f"{best.took_us} us a {step}, {band.words(best.objective_us)}"
            notes.append(f"The best of this search is predicted to take {said}: {band.why}.")
    gains = None if facts.gains is None else gains_in_words(facts.gains)
    notes += [] if gains is None else [f"Searching gained {gains}."]
    notes += [] if best is None or best.is_predicted else _certainty(best, facts.tied)
    colour = "failed" if best is None else best.outcome
    tiles = [*_tiles(facts, step), ("trials", f"{len(facts.trials):,}")]
    return [
        element("h1", words(campaign.name)),
        element("p", words(work), " ", element("span", words(kind), class_=f"kind {colour}")),
        element("div", *(element("div", element("b", words(v)), words(n)) for n, v in tiles), class_="tiles"),
        *map(_note, notes),
    ]


def _tiles(facts: Facts, step: str) -> list[tuple[str, str]]:
    """The numbers of the answer, (name, value): of the measured schedule where one answers, else of the best row."""
    best, known, batch = facts.best, facts.known, facts.campaign.batch
    floor_us = None if best is None else best.floor_us
    if known is not None:
        us, tiles = known.latency_us, [("the answer, measured", f"{known.latency_us:,.1f} us a {step}")]
        tiles.append(("tokens a second", f"{tokens_per_s(us, batch):,.0f}"))
    elif best is not None and best.objective_us is not None:
        us, tiles = best.objective_us, [("best, " + best.kind, f"{best.took_us} us a {step}")]
        rate = tokens_per_s(us, batch)
        tiles.append(("tokens a second", rounded(rate) if best.is_predicted else f"{rate:,.0f}"))
    else:
        return []
    return tiles if floor_us is None else [
        *tiles, ("weight floor", f"{floor_us:,.1f} us"), ("of the floor", f"{floor_fraction(floor_us, us):.1%}"),
    ]  # fmt: skip


def _certainty(best: TrialRecord, tied: Sequence[TrialRecord]) -> list[str]:
    """How certain it is that a measured row is the best, and what disturbed its measurement."""
    said = []
    if best.source != "final":
        said.append("No final was held: these trials were measured at different times, so their order may be chance.")
    elif tied:
        others = ", ".join(f"{record.title} ({record.latency_us:,.1f} us)" for record in tied)
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


def _answer_us(facts: Facts) -> float | None:
    return None if facts.known is None else facts.known.latency_us


def _history(facts: Facts) -> list[str]:
    drawn, what = history(facts.records, _answer_us(facts)), shown(facts.records, _answer_us(facts))
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
        count, above = len(what.above), f"above {what.limit_in_words} us, {MOST_TIMES:g} times the best,"
        said.append(
            f"1 trial {above} is a triangle at the upper edge."
            if count == 1
            else f"{count:,} trials {above} are triangles at the upper edge."
        )
    if what.answer_us is not None:
        said.append("Dotted: the answer, which was measured elsewhere.")
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
    knobs, best, found = facts.knobs, facts.best, _found(facts)
    bars, lines = _costs(facts), _coordinates(facts)
    cut = f" Only the best {MOST_LINES:,} are drawn." if len(facts.trials) > MOST_LINES else ""
    parts = [_section("What a knob can cost"), _note(_costs_in_words(facts, found)), _drawing(bars, narrow=True)]
    parts.append(_section("Knobs and latency"))
    if not lines:
        return [*parts, _note("No trial of the space has a latency.")]
    most = f"The {MOST_AXES} knobs that can cost most, from the left. " if "coordinates_rest" in lines else ""
    most = most if costliest(found) else ""
    orange = "" if knobs.best is None else "; the best is orange"
    parts += [_note(f"{most}A line is a trial, stronger where faster{orange}.{cut}"), _drawing(lines["coordinates"])]
    if "coordinates_rest" in lines:
        parts.append(element("details", element("summary", "the other knobs"), _drawing(lines["coordinates_rest"])))
    return [*parts, *(_changes(knobs, found, best) if best is not None else [])]


def _costs_in_words(facts: Facts, found: Sequence[Change]) -> str:
    """What the picture of costs shows, and which knobs it cannot show."""
    knobs, best = facts.knobs, facts.best
    if knobs is None or best is None or best.objective_us is None:
        return "Not known: no trial has a latency."
    if knobs.best is None:
        return f"Not known: {OUTSIDE}."
    if knobs.beside is not None:
        least = f"{RESOLUTION:.1%} ({rounded(RESOLUTION * best.objective_us)} us)"
        said = "How much longer the best schedule takes by the cost model where this knob alone has its worst value."
        return f"{said} Predictions do not tell less than {least} apart; a knob that costs less has no bar."
    told = costliest(found)
    silent = [axis.name for axis in knobs.dimensions if len(axis.values) > 1 and axis.name not in told]
    said = "How much longer than the best a trial took that differs from it in this knob alone, at its worst value."
    if not told:
        return "Not known: no trial differs from the best in one knob alone."
    return f"{said} Not known, since no trial changed them alone: {', '.join(silent)}." if silent else said


def _found(facts: Facts) -> list[Change]:
    return [] if facts.knobs is None else changes(facts.knobs, facts.trials, facts.best)


def _costs(facts: Facts) -> str | None:
    return None if facts.best is None else costs(_found(facts), facts.best)


def _coordinates(facts: Facts) -> dict[str, str]:
    """The pictures of knobs and latency, by name: one of the knobs that can cost most, and one of the others."""
    if facts.knobs is None:
        return {}
    names = ("coordinates", "coordinates_rest")
    drawn = {
        name: coordinates(facts.knobs, axes, facts.trials, facts.best)
        for name, axes in zip(names, weighty(facts.knobs, _found(facts)), strict=True)
        if axes
    }
    return {name: drawing for name, drawing in drawn.items() if drawing is not None}


def _changes(knobs: Knobs, found: Sequence[Change], best: TrialRecord) -> list[str]:
    title = _section("What a change costs")
    if not found:
        return [title, _note(f"Not known: {OUTSIDE}.")] if knobs.best is None else []
    most = {axis.name for axis in weighty(knobs, found)[0]}
    rest = [each for each in found if each.knob not in most]
    alone = any(each.alone_us is not None for each in found)
    said = "No trial differs from the best in one knob alone."
    if knobs.beside is not None:
        said = "Only that: the best schedule with this knob alone changed, by the cost model."
    elif alone:
        said = "Only that: the trial that differs from the best in this knob alone; empty where none does."
    return [
        title,
        _note(f"Difference to the best trial's latency. {said} At best: the fastest trial with that value, whatever "
              "else it changed."),
        _changed([each for each in found if each.knob in most], alone, best),
        element("details", element("summary", "the other knobs"), _changed(rest, alone, best)) if rest else "",
    ]  # fmt: skip


def _changed(found: Sequence[Change], alone: bool, best: TrialRecord) -> str:
    """The table of changes, with a column for changes of one knob alone if any is known."""
    headers = ("knob", "best", "instead", *(["only that, us"] if alone else []), "at best, us", "trials")
    rows = [
        (each.knob, str(each.best), str(each.value), *([cost(each.alone_us, best)] if alone else []),
         cost(each.least_us, best), f"{each.trials:,}")
        for each in found
    ]  # fmt: skip
    return _table(headers, rows, numbers=range(3, len(headers)))


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
        (str(r.trial), r.took_us, r.outcome, _percent(r.floor_fraction), origin_of(r, facts.records), r.config_id,
         r.program_id or "", marks(r) or "")
        for r in ranked(facts.records)[:SHOWN]
    ]  # fmt: skip
    headers = ("trial", "us", "", "of floor", "from", "config", "program", "")
    parts = [_section("Best trials"), _table(headers, rows, numbers=(0, 1, 3)) if rows else ""]
    if facts.knobs is not None and facts.best is not None:
        first, title = facts.knobs.first, _section("The best schedule's knobs")
        compared = [(name, str(value), str(first[name])) for name, value in (facts.knobs.best or {}).items()]
        parts += [title, _table(("knob", "best", "known good"), compared) if compared else
                  _note(f"Not known: {OUTSIDE}. Below is all that it sets.")]
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


def _drawing(svg: str | None, narrow: bool = False) -> str:
    """A picture in a box that scrolls where the page is narrow, so that its text stays large enough to read; a `narrow`
    picture fits. Empty without one."""
    return "" if svg is None else element("div", svg, class_="narrow" if narrow else "wide")


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        sides = ["n" if at in numbers else None for at in range(len(cells))]
        return element("tr", *(element(kind, words(c) or " ", class_=s) for c, s in zip(cells, sides, strict=True)))

    head = [line("th", headers)] if any(headers) else []
    return element("div", element("table", *head, *(line("td", row) for row in rows)), class_="wide")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
