"""Draws the picture of docs/results.md: a campaign's history, and one layer of its best schedule on every SM.

`python experiments/picture.py --store flywheel.db --campaign NAME --output docs/search.svg`
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flywheel.report.facts import gather
from flywheel.report.history import WIDTH, history
from flywheel.report.layer import layer
from flywheel.report.svg import element, label, picture, standalone
from flywheel.store.sql import open_store

_HEADING, _HISTORY, _LAYER = 30.0, 400.0, 560.0
"""Heights; each drawing keeps its own below that."""


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="flywheel.db")
    parser.add_argument("--campaign", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with open_store(arguments.store, create=False) as store:
        campaign = store.campaign(arguments.campaign)
        records = store.trials(arguments.campaign)
    assert campaign is not None, arguments.campaign
    facts = gather(campaign, records)
    above = history(facts.records)
    assert above is not None, "no trial has a latency"
    assert facts.schedule is not None, facts.missing
    title = f"{campaign.work}: {len(facts.trials):,} trials of sampler {campaign.sampler}"
    parts = [
        label(54, 20, title, font_weight="bold", font_size="14"),
        element("g", above, transform=f"translate(0 {_HEADING})"),
        element("g", layer(facts.schedule), transform=f"translate(0 {_HEADING + _HISTORY})"),
    ]
    drawing = picture(WIDTH, _HEADING + _HISTORY + _LAYER, title, parts)
    arguments.output.write_text(standalone(drawing), encoding="utf-8")


if __name__ == "__main__":
    main()
