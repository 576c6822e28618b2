from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rows import timed

from flywheel.measure.record import TrialRecord
from flywheel.report.files import campaign_files, campaign_gains
from flywheel.search.gains import gains_of
from flywheel.store.campaign import Campaign
from flywheel.store.sql import open_store

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
    assert words.startswith("Searching gained ")
    assert "% over the best schedule that was known" in words
    assert numbers["gained/known_us"] == 2100.0
    assert numbers["gained/percent"] == pytest.approx(100 * gains.over_seed)
    assert numbers["gained/percent"] == pytest.approx(100 * (2100.0 / 2037.0 - 1))


def test_predictions_gain_nothing_below_what_they_can_tell(make_records: Records, make_campaign: Campaigns) -> None:
    rows = make_records(2)
    seed = replace(rows[1], source="seed", trial=0, predicted_us=2009.0, floor_fraction=1500.0 / 2009.0)  # 0.45 % more
    found = replace(rows[0], trial=1)
    words, numbers = campaign_gains(make_campaign(), [seed, found])
    assert words is not None
    assert words.startswith("Searching gained nothing that predictions can tell over the best schedule that was known")
    assert numbers["gained/percent"] == 0.0
    assert numbers["gained/known_us"] == 2010.0
    slower = replace(seed, predicted_us=2011.0, floor_fraction=1500.0 / 2011.0)  # 0.55 % more
    assert "Searching gained 0.6 % over" in str(campaign_gains(make_campaign(), [slower, found])[0])


def test_the_gain_of_predictions_names_the_measured_answer(make_records: Records, make_campaign: Campaigns) -> None:
    work = {"model": "llama3-8b", "gpu": "h100"}
    words, _ = campaign_gains(make_campaign(**work), make_records(2, **work))
    answer = "The answer is measured: 5,000.1 us by shipped schedule llama3-8b-h100-bf16-c512-b1."
    assert words is not None and words.endswith(answer)
    records = [timed(row, 5100.0, predicted_us=None, predictor=None) for row in make_records(2, **work)]
    assert answer not in str(campaign_gains(make_campaign(**work), records)[0])


def test_of_a_model_that_is_gone_no_gain_is_known(make_records: Records, make_campaign: Campaigns) -> None:
    assert campaign_gains(make_campaign(model="/gone/model"), make_records(2)) == (None, {})
    assert campaign_gains(make_campaign(), []) == (None, {})


def test_the_page_of_predictions_begins_with_what_was_measured(
    make_records: Records, make_campaign: Campaigns, tmp_path: Path
) -> None:
    work = {"model": "llama3-8b", "gpu": "h100"}
    campaign, records = make_campaign(**work), make_records(3, **work)
    shipped = campaign_files(campaign, records)["report.html"]
    assert "<b>5,000.1 us a token</b>the answer, measured" in shipped
    assert "Shipped schedule llama3-8b-h100-bf16-c512-b1 is the answer: it was measured, on NVIDIA H100" in shipped
    with open_store(str(tmp_path / "flywheel.db")) as store:
        rows = [timed(row, 4900.0 + row.trial, campaign="elsewhere") for row in records]
        store.append_all(rows, make_campaign(name="elsewhere", **work))
        own = campaign_files(campaign, records, store)["report.html"]
    assert "<b>4,900.0 us a token</b>the answer, measured" in own
    assert "Trial 0 of campaign elsewhere is the answer" in own
    measured = [timed(row, 5100.0) for row in records]
    assert "the answer, measured" not in campaign_files(campaign, measured)["report.html"]
