"""`flywheel report`: write a campaign as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from flywheel.cli.options import STDOUT, OutputFile, check_writable, command, json_option, store_option, write_file
from flywheel.cli.text import amount, note, show, show_json
from flywheel.measure.standing import trials_of
from flywheel.search.provenance import find_campaign


@command
@click.argument("campaign", required=False, metavar="[NAME]")
@click.option("-o", "--output", type=OutputFile(), metavar="FILE.html",
              help="File to write; - is stdout.  [default: NAME.html]")  # fmt: skip
@store_option
@json_option
def report(campaign: str | None, output: Path | None, store: str, as_json: bool) -> None:
    """Write one HTML page about the campaign NAME, or the newest one. The page loads nothing else.

    It shows the history with the weight floor, the outcomes, the knobs, and the best schedule on every SM. The same
    rows give the same bytes.
    """
    from flywheel.report.files import PAGE, campaign_files
    from flywheel.store.sql import open_store

    if output is not None:
        check_writable(output)
    with open_store(store, create=False) as opened:
        found = find_campaign(opened, campaign)
        target = Path(f"{found.name.replace('/', '_')}.html") if output is None else output
        check_writable(target)
        records = opened.trials(found.name)
        text = campaign_files(found, records, opened)[PAGE]
    write_file(target, text)
    if target == STDOUT:
        return
    trials = len(trials_of(records))
    if as_json:
        show_json({"campaign": found.name, "path": str(target), "trials": trials, "bytes": len(text.encode())})
    else:
        show(f"{target}: {amount(trials, 'trial')}, {len(text.encode()) / 1e3:,.0f} kB")
        note("open it in any browser; it loads nothing else")
