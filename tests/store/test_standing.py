from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from flywheel.errors import StoreError, TrialExistsError
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, trials_of
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store, open_store

Records = Callable[..., TrialRecord]
Campaigns = Callable[..., Campaign]
CAMPAIGNS = 60


@pytest.fixture
def store(store_url: str, make_campaign: Campaigns) -> Iterator[Store]:
    with open_store(store_url) as opened:
        opened.create_campaign(make_campaign("first"))
        yield opened


def drawn(make_record: Records, campaign: str, chance: random.Random) -> list[TrialRecord]:
    """Rows of a campaign with few programs, equal latencies, gains above and below zero, and finals; the first ones may
    be imported."""
    records: list[TrialRecord] = []
    imported = chance.choice((0, 0, 3, 14))
    moment = f"2026-01-02T{chance.randrange(24):02}:00:00+00:00"
    for trial in range(chance.randrange(14)):
        source = chance.choice(("search", "search", "store", "final"))
        if source == "final" and (trial == imported or not (records and records[-1].source == "final")):
            moment = f"2026-01-02T00:00:{trial:02}+00:00"
        low = chance.choice((None, -1.0, 0.0, 1.0))
        gains = {} if low is None else {"rival_us": 100.0, "gain_low_us": low, "gain_high_us": low + 1.0}
        kind = "measured" if source == "final" or chance.random() < 0.8 else "crashed"
        numbers = {"latency_us": chance.choice((98.0, 99.0, 100.0, 101.0)), **gains} if kind == "measured" else {}
        if numbers and (kind_of_doubt := chance.randrange(6)) < 3:
            numbers |= ({"strangers": 1}, {"strangers": 0}, {"p10_us": 90.0, "p90_us": 130.0})[kind_of_doubt]
        record = make_record(
            kind, campaign=campaign, trial=trial, program_id=chance.choice("abc"), source=source, created_at=moment,
            imported_from="elsewhere" if trial < imported else None, **numbers,
        )  # fmt: skip
        records.append(record)
    return records


def test_sql_and_python_name_the_same_best_of_every_campaign(
    store: Store, make_record: Records, make_campaign: Campaigns
) -> None:
    chance = random.Random(7)
    written = {}
    for number in range(CAMPAIGNS):
        name = f"campaign {number}"
        store.create_campaign(make_campaign(name, measure="cuda"))
        written[name] = drawn(make_record, name, chance)
        store.append_all(sorted(written[name], key=lambda _: chance.random()))  # as imports in pieces may do
    summaries = {summary.campaign.name: summary for summary in store.campaigns()}
    for name, records in written.items():
        best = best_of(records)
        assert store.best(measured=True, campaign=name) == best
        found_us = {"measured": summaries[name].best_measured_us, "imported": summaries[name].best_imported_us}
        assert best is None or found_us[best.kind] == best.latency_us
        assert (found_us["measured"] is None) == (best is None or best.kind == "imported")
        assert (summaries[name].rows, summaries[name].trials) == (len(records), len(trials_of(records)))
        assert sum(summaries[name].outcomes.values()) == summaries[name].trials
    bests = [best for best in map(best_of, written.values()) if best is not None]
    found = store.best(measured=True, model="llama3.2-1b", gpu="h100")
    assert found is not None
    own = [best.latency_us for best in bests if best.kind == "measured" and not best.is_doubtful and best.latency_us]
    assert (found.kind, found.latency_us) == ("measured", min(own))
    assert any(record.source == "final" for record in bests)
    assert {record.is_doubtful for record in bests} == {True, False}
    assert any(record.kind == "imported" for record in bests)


def test_rows_that_belong_together_are_there_all_or_not_at_all(store: Store, make_record: Records) -> None:
    store.append(make_record(trial=2))
    with pytest.raises(TrialExistsError, match="trial 2 already"):
        store.append_all([make_record(trial=trial) for trial in (1, 2, 3)])
    assert [record.trial for record in store.trials("first")] == [2]
    with pytest.raises(StoreError, match="campaign 'nowhere' does not exist"):
        store.append_all([make_record(trial=3), make_record(campaign="nowhere")])
    assert [record.trial for record in store.trials("first")] == [2]
    store.append_all([])


def test_a_campaign_that_somebody_broke_is_store_trouble(
    store: Store, make_campaign: Campaigns
) -> None:
    broken = make_campaign("broken")
    object.__setattr__(broken, "spec", "garbage")
    store.create_campaign(broken)
    with pytest.raises(StoreError, match="campaign 'broken': spec is no JSON object"):
        store.campaigns()
    with pytest.raises(StoreError, match="campaign 'broken': spec is no JSON object"):
        store.campaign("broken")


def test_a_final_answers_before_the_trial_that_it_measured_again(
    store: Store, make_record: Records, make_campaign: Campaigns
) -> None:
    store.create_campaign(make_campaign("on-gpu", measure="cuda"))
    rows = [
        make_record("measured", campaign="on-gpu", trial=trial, source=source, latency_us=us)
        for trial, (source, us) in enumerate([("search", 99.0), ("final", 101.0), ("search", 98.0), ("final", 102.0)])
    ]
    store.append_all(rows)
    found = store.seen("0123456789ab", gpu="h100", dtype="BF16", measure="cuda")
    assert found == rows[3]


def test_an_imported_row_answers_nothing_and_is_the_best_only_where_there_is_no_other(
    store: Store, make_record: Records, make_campaign: Campaigns
) -> None:
    store.create_campaign(make_campaign("table", measure="cuda"))
    imported = make_record("measured", campaign="table", latency_us=90.0, imported_from="elsewhere")
    store.append(imported)
    assert store.seen("0123456789ab", gpu="h100", dtype="BF16", measure="cuda") is None
    assert store.best(measured=True, gpu="h100") == imported
    store.create_campaign(make_campaign("own", measure="cuda"))
    own = make_record("measured", campaign="own", latency_us=100.0)
    store.append(own)
    assert store.seen("0123456789ab", gpu="h100", dtype="BF16", measure="cuda") == own
    assert store.best(measured=True, gpu="h100") == own
    assert store.best(measured=True, campaign="table") == imported
