"""`flywheel campaigns`: a store's campaigns and their results."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flywheel.cli.options import command, document_option, give, json_option, store_option
from flywheel.cli.provenance import find_campaign, search_command
from flywheel.cli.text import ABSENT, Command, counts, pairs, percent, show, show_table, ties, us
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, judged, marks, ranked, row_name, tied_with, trial_of

if TYPE_CHECKING:
    from flywheel.store.campaign import Campaign, CampaignSummary

SHOWN = 5
"""How many of one campaign's best trials the text shows."""


@command
@click.argument("name", required=False)
@store_option
@document_option
@json_option
def campaigns(name: str | None, store: str, output: Path | None, as_json: bool) -> None:
    """List the campaigns of a store with their outcomes and best latencies, or show the campaign NAME."""
    from flywheel.store.sql import open_store

    with open_store(store, create=False) as opened:
        summaries = opened.campaigns()
        campaign = find_campaign(opened, name) if name is not None else None
        trials = opened.trials(campaign.name) if campaign is not None else []
        where = opened.name
    if campaign is None:
        listed = {"store": where, "campaigns": [_document(each) for each in summaries]}
        give(listed, output, as_json, lambda: _list(where, summaries))
        return
    summary = next(each for each in summaries if each.campaign.name == campaign.name)
    best = [asdict(record) for record in ranked(trials)[:SHOWN]]
    tied = [record.trial for record in tied_with(best_of(trials), trials)]
    document = {"store": where, **_document(summary), "best": best, "tied": tied}
    give(document, output, as_json, lambda: _show(where, summary, trials))


def _list(where: str, summaries: list[CampaignSummary]) -> None:
    if not summaries:
        show(f"{where}: no campaigns")
        return
    headers = ("<!campaign", "?<!model", "?<!GPU", "?<dtype", "?context", "?batch", "?<sampler", "?trials", "best",
               "<!", "?<outcomes")  # fmt: skip
    rows = []
    for summary in summaries:
        campaign = summary.campaign
        best, kind = _best(summary)
        rows.append(
            (
                campaign.name, campaign.model, campaign.gpu, _types(campaign), str(campaign.context),
                str(campaign.batch), campaign.sampler, f"{summary.trials:,}", us(best), kind,
                counts(summary.outcomes),
            )
        )  # fmt: skip
    show_table(headers, rows)


def _types(campaign: Campaign) -> str:
    """The campaign's dtype, and the format of its weights where they differ."""
    own = campaign.weights in (None, campaign.dtype)
    return campaign.dtype if own else f"{campaign.dtype}, {campaign.weights}"


def _best(summary: CampaignSummary) -> tuple[float | None, str]:
    """(latency, kind). A measurement of this store goes before an imported one, and both before a prediction."""
    if summary.best_measured_us is not None:
        return summary.best_measured_us, "measured"
    if summary.best_imported_us is not None:
        return summary.best_imported_us, "imported"
    return summary.best_predicted_us, "predicted" if summary.best_predicted_us is not None else ""


def _document(summary: CampaignSummary) -> dict[str, Any]:
    campaign = summary.campaign
    return {
        **asdict(campaign),
        "spec": json.loads(campaign.spec),
        "trials": summary.trials,
        "outcomes": dict(summary.outcomes),
        "best_measured_us": summary.best_measured_us,
        "best_imported_us": summary.best_imported_us,
        "best_predicted_us": summary.best_predicted_us,
    }


def _show(where: str, summary: CampaignSummary, trials: list[TrialRecord]) -> None:
    campaign: Campaign = summary.campaign
    top = best_of(trials)
    tied = ((row_name(record, trials), record.latency_us) for record in tied_with(top, trials))
    show(f"{campaign.name}: {campaign.work}")
    last = trials[-1].created_at if trials else ABSENT
    show(
        *pairs(
            [
                ("started", campaign.created_at),
                ("last trial", last),
                ("trials", f"{summary.trials:,}: {counts(summary.outcomes)}"),
                ("latencies", "predicted by a cost model" if campaign.measure == "predict" else "measured"),
                ("tied", ties(tied)),
                ("verdict", None if top is None else judged(top)),
                ("store", where),
                ("command", Command(shlex.split(search_command(campaign, summary.trials)))),
            ]
        )
    )
    best = ranked(trials)[:SHOWN]
    if best:
        headers = ("trial", "latency", "<", "of floor", "<from", "<!config", "?<!program", "<")
        rows = [
            (str(trial_of(r, trials)), us(r.objective_us), r.outcome, percent(r.floor_fraction), r.source,
             r.config_id, r.program_id or ABSENT, marks(r) or "")
            for r in best
        ]  # fmt: skip
        show_table(headers, rows, indent="  ", gap=True)
    refused = [record for record in trials if record.reason is not None]
    if refused:
        record = refused[-1]
        said = f"trial {record.trial}, {record.outcome.replace('_', ' ')}: {record.reason}"
        show("", f"  last without a latency: {said}")
