"""A campaign as files: the page, its pictures, the best schedule and the table of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flywheel.errors import FlywheelError
from flywheel.measure.latency import curtailed
from flywheel.measure.record import TrialRecord
from flywheel.report.facts import gather
from flywheel.report.page import page, pictures
from flywheel.search.gains import gains_document, gains_in_words, gains_of, workload_of
from flywheel.search.knowledge.known import best_known
from flywheel.search.provenance import schedule_text, search_command
from flywheel.search.space import choices_of
from flywheel.store.campaign import Campaign
from flywheel.store.mirror import Views
from flywheel.store.sql import Store
from flywheel.store.tsv import to_tsv

PAGE: Final = "report.html"


def campaign_files(
    campaign: Campaign, records: Sequence[TrialRecord], store: Store | None = None
) -> Mapping[str, str]:
    """The files of a campaign, text by path; `records` are its rows by number. `store` is where else its work may have
    been measured. The same rows give the same bytes."""
    facts = gather(campaign, records, store)
    schedule = schedule_text(facts.best, campaign, len(facts.trials)) if facts.best is not None else None
    files = {PAGE: page(facts, schedule, search_command(campaign, len(facts.trials))), "results.tsv": to_tsv(records)}
    files |= {} if schedule is None else {"best_schedule.json": schedule}
    return files | {f"plots/{name}": drawing for name, drawing in pictures(facts).items()}


def campaign_gains(campaign: Campaign, records: Sequence[TrialRecord]) -> tuple[str | None, Mapping[str, float]]:
    """What a campaign's search gained, and the shipped schedule that answers it if it only predicted: in sentences, and
    the gain as numbers by a name with their unit. None and no numbers where it gained nothing that is known, or its
    model is not on this machine."""
    try:
        gains = gains_of(campaign, records)
        known = best_known(workload_of(campaign), None) if gains is not None and gains.best.is_predicted else None
    except FlywheelError:
        return None, {}
    if gains is None:
        return None, {}
    told = gains_document(gains) or {}
    numbers = {
        "first_us": told["start_us"], "known_us": told["seed_us"],
        "over_first_percent": None if gains.over_start is None else gains.over_start * 100,
        "percent": None if gains.over_seed is None else gains.over_seed * 100,
        "beyond_noise": None if gains.sure is None else float(gains.sure),
    }  # fmt: skip
    digits = curtailed if gains.best.is_predicted else float
    numbers |= {name: digits(us) for name, us in numbers.items() if name.endswith("_us") and us is not None}
    words = gains_in_words(gains)
    said = [] if words is None else [f"Searching gained {words}."]
    said += [] if known is None else [f"The answer is measured: {known.latency_us:,.1f} us by {known.words}."]
    return " ".join(said) or None, {f"gained/{name}": value for name, value in numbers.items() if value is not None}


def views() -> Views:
    """The functions of this version that a mirror calls."""
    return Views(choices_of, campaign_files, campaign_gains)
