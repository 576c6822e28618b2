"""A campaign as files: the page, its pictures, the best schedule and the table of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flywheel.measure.record import TrialRecord
from flywheel.report.facts import gather
from flywheel.report.page import page, pictures
from flywheel.search.choices import choices_of
from flywheel.search.provenance import schedule_text, search_command
from flywheel.store.campaign import Campaign
from flywheel.store.mirror import Views
from flywheel.store.tsv import to_tsv

PAGE: Final = "report.html"


def campaign_files(campaign: Campaign, records: Sequence[TrialRecord]) -> Mapping[str, str]:
    """The files of a campaign, text by path; `records` are its rows by number. The same rows give the same bytes."""
    facts = gather(campaign, records)
    schedule = schedule_text(facts.best, campaign, len(facts.trials)) if facts.best is not None else None
    files = {PAGE: page(facts, schedule, search_command(campaign, len(facts.trials))), "results.tsv": to_tsv(records)}
    files |= {} if schedule is None else {"best_schedule.json": schedule}
    return files | {f"plots/{name}": drawing for name, drawing in pictures(facts).items()}


def views() -> Views:
    """The functions of this version that a mirror calls."""
    return Views(choices_of, campaign_files)
