"""`flywheel report`: write a campaign as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flywheel.cli.options import STDOUT, OutputFile, check_writable, command, json_option, store_option, write_file
from flywheel.cli.provenance import find_campaign, schedule_text, search_command
from flywheel.cli.text import amount, note, show, show_json
from flywheel.measure.standing import trials_of

if TYPE_CHECKING:
    from flywheel.measure.record import TrialRecord
    from flywheel.store.campaign import Campaign
    from flywheel.store.mirror import Views

PAGE = "report.html"


@command
@click.argument("campaign", required=False)
@click.option("-o", "--output", "--out", "output", type=OutputFile(), metavar="FILE.html",
              help="File to write; - is stdout.  [default: CAMPAIGN.html]")  # fmt: skip
@store_option
@json_option
def report(campaign: str | None, output: Path | None, store: str, as_json: bool) -> None:
    """Write one HTML page about CAMPAIGN, or the newest one. The page loads nothing else.

    It shows the history with the weight floor, the outcomes, the knobs, and the best schedule on every SM. The same
    rows give the same bytes.
    """
    from flywheel.store.sql import open_store

    if output is not None:
        check_writable(output)
    with open_store(store, create=False) as opened:
        found = find_campaign(opened, campaign)
        target = Path(f"{found.name.replace('/', '_')}.html") if output is None else output
        check_writable(target)
        records = opened.trials(found.name)
    text = campaign_files(found, records)[PAGE]
    write_file(target, text)
    if target == STDOUT:
        return
    trials = len(trials_of(records))
    if as_json:
        show_json({"campaign": found.name, "path": str(target), "trials": trials, "bytes": len(text.encode())})
    else:
        show(f"{target}: {amount(trials, 'trial')}, {len(text.encode()) / 1e3:,.0f} kB")
        note("open it in any browser; it loads nothing else")


def campaign_files(campaign: Campaign, records: Sequence[TrialRecord]) -> Mapping[str, str]:
    """A campaign as files by path: the page, its pictures, the best schedule and the table of trials."""
    from flywheel.report.facts import gather
    from flywheel.report.page import page, pictures
    from flywheel.store.tsv import to_tsv

    facts = gather(campaign, records)
    schedule = schedule_text(facts.best, campaign, len(facts.trials)) if facts.best is not None else None
    files = {PAGE: page(facts, schedule, search_command(campaign, len(facts.trials))), "results.tsv": to_tsv(records)}
    files |= {} if schedule is None else {"best_schedule.json": schedule}
    return files | {f"plots/{name}": drawing for name, drawing in pictures(facts).items()}


def views() -> Views:
    """The functions of this version that a mirror calls."""
    from flywheel.report.facts import trial_knobs
    from flywheel.store.mirror import Views

    return Views(trial_knobs, campaign_files)
