"""`flywheel campaigns`: a store's campaigns and their results."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flywheel.cli.options import (
    announce_written,
    command,
    document_option,
    give,
    json_option,
    store_option,
    write_file,
)
from flywheel.cli.text import (
    ABSENT,
    Command,
    amount,
    counts,
    note,
    pairs,
    percent,
    predicted,
    show,
    show_table,
    ties,
    tokens,
    us,
    us_of,
)
from flywheel.errors import FlywheelError, UsageError
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, judged, marks, origin_of, ranked, tied_with
from flywheel.search.provenance import find_campaign, search_command

if TYPE_CHECKING:
    from flywheel.search.gains import Gains
    from flywheel.store.campaign import Campaign, CampaignSummary
    from flywheel.store.sql import Store

SHOWN = 5
"""How many of one campaign's best trials the text shows."""


@command
@click.argument("name", required=False)
@click.option("--archive", type=click.Path(path_type=Path), metavar="FILE.tsv",
              help="Write the trials of NAME to FILE, as flywheel export does, then delete the campaign.")
@click.option("--delete", "deleting", is_flag=True, help="Delete the campaign NAME with all of its trials.")
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
@store_option
@document_option
@json_option
def campaigns(
    name: str | None, archive: Path | None, deleting: bool, yes: bool, store: str, output: Path | None, as_json: bool
) -> None:  # fmt: skip
    """List the campaigns of a store with their outcomes and best latencies, or show the campaign NAME.

    An archived campaign comes back with flywheel import FILE --name NAME.
    """
    from flywheel.search.gains import gains_document
    from flywheel.store.sql import open_store

    if archive is not None or deleting:
        _remove(name, archive, yes, store)
        return
    with open_store(store, create=False) as opened:
        summaries = opened.campaigns()
        campaign = find_campaign(opened, name) if name is not None else None
        trials = opened.trials(campaign.name) if campaign is not None else []
        every = [] if campaign is not None else [_gained(each.campaign, opened) for each in summaries]
        where = opened.name
    if campaign is None:
        pairs_of = zip(summaries, every, strict=True)
        described = [_document(each) | {"gained": gains_document(gains)} for each, gains in pairs_of]
        give({"store": where, "campaigns": described}, output, as_json, lambda: _list(where, summaries, every))
        return
    summary = next(each for each in summaries if each.campaign.name == campaign.name)
    best = [asdict(record) for record in ranked(trials)[:SHOWN]]
    tied = [record.trial for record in tied_with(best_of(trials), trials)]
    gains = _gained(campaign, trials)
    document = {"store": where, **_document(summary), "gained": gains_document(gains),
                "best": best, "tied": tied}  # fmt: skip
    give(document, output, as_json, lambda: _show(where, summary, trials, gains))


def _remove(name: str | None, archive: Path | None, yes: bool, store: str) -> None:
    """Delete a campaign, after its table is written where one is asked for."""
    from flywheel.store.sql import open_store
    from flywheel.store.tsv import to_tsv

    if name is None:
        raise UsageError("campaigns: --archive and --delete need the NAME of a campaign")
    with open_store(store, create=False) as opened:
        campaign = find_campaign(opened, name)
        if campaign.name != name:
            raise UsageError(f"campaigns: {name!r} only begins a name; to remove {campaign.name}, give it whole")
        rows = opened.trials(campaign.name)
        if archive is not None:
            if archive.exists():
                raise UsageError(f"{archive}: exists already; name a new file")
            write_file(archive, to_tsv(rows))
            announce_written(archive)
        elif not yes and not click.confirm(f"Delete {campaign.name} and its {amount(len(rows), 'row')}?", err=True):
            note(f"kept campaign {campaign.name}")
            return
        opened.delete_campaign(campaign.name)
    note(f"deleted campaign {campaign.name}, {amount(len(rows), 'row')}")


def _list(where: str, summaries: list[CampaignSummary], every: list[Gains | None]) -> None:
    if not summaries:
        show(f"{where}: no campaigns")
        return
    headers = ("<!campaign", "?<!model", "?<!GPU", "?<dtype", "?context", "?batch", "?<sampler", "?trials", "best",
               "<!", "?tokens/s", "?gain", "?<started", "?<host", "?<outcomes")  # fmt: skip
    rows = []
    for summary, gains in zip(summaries, every, strict=True):
        campaign = summary.campaign
        best, kind = _best(summary)
        shown = predicted(best) if kind == "predicted" else us(best)
        rows.append(
            (
                campaign.name, campaign.model, campaign.gpu, _types(campaign), str(campaign.context),
                str(campaign.batch), campaign.sampler, f"{summary.trials:,}", shown, kind,
                tokens(best, campaign.batch, kind == "predicted"), percent(None if gains is None else gains.over_seed),
                campaign.created_at[:10], ", ".join(summary.hosts), counts(summary.outcomes),
            )
        )  # fmt: skip
    show_table(headers, rows)


def _gained(campaign: Campaign, rows: list[TrialRecord] | Store) -> Gains | None:
    """What the campaign gained, by all of its rows or from the store; None where its model is not on this machine, or a
    row is malformed."""
    from flywheel.search.gains import gains_in, gains_of

    try:
        return gains_of(campaign, rows) if isinstance(rows, list) else gains_in(rows, campaign)
    except FlywheelError:
        return None


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
        "hosts": list(summary.hosts),
    }


def _show(where: str, summary: CampaignSummary, trials: list[TrialRecord], gains: Gains | None) -> None:
    from flywheel.search.gains import gains_in_words
    from flywheel.search.space import lost_pin

    campaign: Campaign = summary.campaign
    lost = lost_pin(campaign)
    top = best_of(trials)
    tied = ((record.title, record.latency_us) for record in tied_with(top, trials))
    show(f"{campaign.name}: {campaign.work}")
    last = trials[-1].created_at if trials else ABSENT
    show(
        *pairs(
            [
                ("started", campaign.created_at),
                ("last trial", last),
                ("hosts", ", ".join(summary.hosts) or None),
                ("GPU", ", ".join(dict.fromkeys(filter(None, (record.gpu_name for record in trials)))) or None),
                ("gained", None if gains is None else gains_in_words(gains)),
                ("trials", f"{summary.trials:,}: {counts(summary.outcomes)}"),
                ("latencies", "predicted by a cost model" if campaign.measure == "predict" else "measured"),
                ("tied", ties(tied)),
                ("verdict", None if top is None else judged(top)),
                ("store", where),
                ("ended", None if lost is None else f"no search goes on with {lost}"),
                ("command", None if lost else Command(shlex.split(search_command(campaign, summary.trials)))),
            ]
        )
    )
    best = ranked(trials)[:SHOWN]
    if best:
        headers = ("trial", "latency", "<", "tokens/s", "of floor", "<from", "<!config", "?<!program", "<")
        rows = [
            (str(r.trial), us_of(r), r.outcome, tokens(r.objective_us, r.batch, r.is_predicted),
             percent(r.floor_fraction), origin_of(r, trials), r.config_id, r.program_id or ABSENT, marks(r) or "")
            for r in best
        ]  # fmt: skip
        show_table(headers, rows, indent="  ", gap=True)
    refused = [record for record in trials if record.reason is not None]
    if refused:
        record = refused[-1]
        said = f"{record.title}, {record.outcome.replace('_', ' ')}: {record.reason}"
        show("", f"  last without a latency: {said}")
