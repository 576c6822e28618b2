from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flywheel.measure.record import TrialRecord
from flywheel.report.files import campaign_files, campaign_gains
from flywheel.search.gains import gains_of
from flywheel.store.campaign import Campaign

Records = Callable[..., list[TrialRecord]]
Campaigns = Callable[..., Campaign]


def test_a_campaign_is_a_page_its_pictures_its_table_and_its_best_schedule(
    make_records: Records, make_campaign: Campaigns
) -> None:
    campaign, records = make_campaign(), make_records(4)
    files = campaign_files(campaign, records)
    assert {name for name in files if "/" not in name} == {"report.html", "results.tsv", "best_schedule.json"}
    assert "plots/history.svg" in files
    assert campaign_files(campaign, records) == files


def test_what_was_gained_is_numbers_with_units_in_their_names(
    make_records: Records, make_campaign: Campaigns
) -> None:
    campaign, rows = make_campaign(), make_records(4)
    records = [replace(rows[0], source="seed", predicted_us=2100.0, floor_fraction=1500.0 / 2100.0), *rows[1:]]
    gains = gains_of(campaign, records)
    assert gains is not None
    assert gains.over_seed is not None
    words, numbers = campaign_gains(campaign, records)
    assert words is not None
    assert "% over the best schedule that was known" in words
    assert numbers["gained/known_us"] == 2100.0
    assert numbers["gained/percent"] == pytest.approx(100 * gains.over_seed)
    assert numbers["gained/percent"] == pytest.approx(100 * (2100.0 / 2037.0 - 1))


def test_of_a_model_that_is_gone_no_gain_is_known(make_records: Records, make_campaign: Campaigns) -> None:
    assert campaign_gains(make_campaign(model="/gone/model"), make_records(2)) == (None, {})
    assert campaign_gains(make_campaign(), []) == (None, {})
