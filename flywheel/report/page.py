"""The report: one HTML page with nothing to fetch, and the same pictures as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import disturbed, judged, marks, ranked
from flywheel.report.facts import Facts
from flywheel.report.history import COLOURS, history, outcomes
from flywheel.report.knobs import MOST_LINES, coordinates, importance
from flywheel.report.layer import layer, shares
from flywheel.report.svg import STYLE, element, standalone, words

SHOWN: Final = 10
"""Best trials, and reasons of failures, that the page lists."""

_CSS: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1d2733;background:#fff;max-width:980px;margin:2rem auto;"
    "padding:0 1rem}h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2.2rem}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:2px 14px 2px 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}"
    "td.n,th.n{text-align:right}p.note{color:#5b6875}pre{background:#f4f6f8;padding:.8rem;overflow-x:auto;font-size:12px}"
    ".tiles{display:flex;flex-wrap:wrap;gap:2.4rem;margin:1rem 0}.tiles b{display:block;font-size:1.35rem}"
    ".kind{color:#fff;border-radius:4px;padding:1px 8px;font-size:13px}"
)
_PREDICTED: Final = "Predicted by the cost model (version {}), not measured."
_COLUMNS: Final = (
    "flywheel_version", "ir_version", "commit", "python", "optuna", "host", "gpu_name", "gpu_driver", "nvrtc",
    "kernels",
)  # fmt: skip


def page(facts: Facts, schedule_json: str | None, command: str) -> str:
    """The whole page, the same bytes for the same facts. `command` is the line that runs the campaign again.

    `schedule_json` is the best trial's exported schedule, None where no trial has a latency.
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
        "outcomes": outcomes(facts.trials) if facts.trials else None,
        "importance": importance(facts.knobs) if facts.knobs else None,
        "coordinates": coordinates(facts.knobs, facts.trials, facts.best) if facts.knobs else None,
        "layer": layer(facts.schedule) if facts.schedule else None,
    }
    return {f"{name}.svg": standalone(drawing) for name, drawing in drawn.items() if drawing is not None}


def _head(facts: Facts) -> list[str]:
    campaign, best = facts.campaign, facts.best
    work = f"{campaign.work}, sampler {campaign.sampler}"
    tiles = []
    kind = "nothing feasible"
    if best is not None and best.objective_us is not None:
        kind = "predicted by a cost model" if best.is_predicted else f"measured on {best.gpu_name or campaign.gpu}"
        kind += f", imported from {best.imported_from}" if best.is_imported else ""
        tiles.append(("best, " + best.kind, f"{best.objective_us:,.1f} us a token"))
        if best.floor_us is not None:
            tiles.append(("weight floor", f"{best.floor_us:,.1f} us"))
        if best.floor_fraction is not None:
            tiles.append(("of the floor", f"{best.floor_fraction:.1%}"))
    tiles.append(("trials", f"{len(facts.trials):,}"))
    colour = COLOURS["failed"] if best is None else COLOURS[best.outcome]
    return [
        element("h1", words(campaign.name)),
        element("p", words(work), " ", element("span", words(kind), class_="kind", style=f"background:{colour}")),
        element("div", *(element("div", element("b", words(v)), words(n)) for n, v in tiles), class_="tiles"),
        *([] if best is None or best.is_predicted else [_note(text) for text in _certainty(best, facts.tied)]),
    ]


def _certainty(best: TrialRecord, tied: Sequence[TrialRecord]) -> list[str]:
    """How sure it is that a measured row is the best, and what disturbed its measurement."""
    said = []
    if best.source != "final":
        said.append("No final was held: these trials were measured at different times, so their order may be chance.")
    elif tied:
        others = ", ".join(f"trial {record.trial} ({record.latency_us:,.1f} us)" for record in tied)
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
    drawn = history(facts.records)
    if drawn is None:
        return [_section("History"), _note("No trial has a latency.")]
    return [
        _section("History"),
        _note("Hollow blue: predicted by the cost model. Full orange: measured on a GPU, and the best of them again in "
              "turn as diamonds. The line is the best so far: a trial within the noise of it is none. No "
              "schedule can be faster than the floor, the weights' bytes over the memory's bandwidth."),
        drawn,
    ]  # fmt: skip


def _outcomes(trials: Sequence[TrialRecord]) -> list[str]:
    if not trials:
        return []
    reasons = Counter(record.reason for record in trials if record.reason is not None)
    rows = [(f"{count:,}", reason) for reason, count in reasons.most_common(SHOWN)]
    table = [_table(("trials", "reason"), rows, numbers=(0,))] if rows else []
    return [_section("Outcomes"), outcomes(trials), *table]


def _knobs(facts: Facts) -> list[str]:
    if facts.knobs is None:
        return [_section("Knobs"), _note(f"Not known: {facts.missing}")]
    bars = importance(facts.knobs)
    lines = coordinates(facts.knobs, facts.trials, facts.best)
    cut = f" Only the best {MOST_LINES:,} are drawn." if len(facts.trials) > MOST_LINES else ""
    return [
        _section("Importance of knobs"),
        _note("Share of each knob in telling the best tenth of the trials from the others (PED-ANOVA). A sampler that "
              "tries few values of a knob blurs it.")
        if bars
        else _note("Too few trials to tell."),
        bars or "",
        _section("Knobs and latency"),
        _note(f"A line is a trial, darker where faster; the best is orange.{cut}") if lines else "",
        lines or _note("No trial of the space has a latency."),
    ]


def _layer(facts: Facts) -> list[str]:
    title = _section("The best schedule on every SM")
    schedule = facts.schedule
    if schedule is None:
        return [] if facts.knobs is None else [title, _note(f"Not shown: {facts.missing}")]
    prediction = schedule.prediction
    finish = sum(prediction.finish_us)
    states = {"busy": prediction.busy_us, "blocked": prediction.blocked_us, "starved": prediction.starved_us}
    told = ", ".join(f"{name} {sum(times) / finish:.1%}" for name, times in states.items())
    rows = [(each.operation, f"{each.tasks:,}", f"{each.time_share:.1%}") for each in shares(schedule)]
    return [
        title,
        _note(f"{_PREDICTED.format(schedule.predictor)} {prediction.latency_us:,.1f} us a token; an SM is {told}."),
        layer(schedule),
        _table(("operation", "tasks", "SM time"), rows, numbers=(1, 2)),
    ]


def _best(facts: Facts, schedule_json: str | None) -> list[str]:
    rows = [
        (str(r.trial), f"{r.objective_us:,.1f}", r.outcome, _percent(r.floor_fraction), r.source, r.config_id,
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


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        sides = ["n" if at in numbers else None for at in range(len(cells))]
        return element("tr", *(element(kind, words(c) or " ", class_=s) for c, s in zip(cells, sides, strict=True)))

    head = [line("th", headers)] if any(headers) else []
    return element("table", *head, *(line("td", row) for row in rows))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
