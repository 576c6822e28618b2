from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from click.testing import Result

from flywheel.store.sql import open_store
from flywheel.store.tsv import to_tsv

Run = Callable[..., Result]


def test_campaigns_are_listed_with_outcomes_and_whether_the_best_is_predicted(run: Run, searched: Path) -> None:
    text = run("campaigns", "--store", str(searched)).stdout
    assert len(text.splitlines()) == 2
    assert "small" in text
    assert "us  predicted  predicted 5" in text
    document = json.loads(run("campaigns", "--store", str(searched), "--json").stdout)
    (campaign,) = document["campaigns"]
    assert (campaign["trials"], campaign["outcomes"], campaign["best_measured_us"]) == (5, {"predicted": 5}, None)
    assert campaign["spec"]["trials"] == 5


def test_one_campaign_shows_its_command_and_best_trials(run: Run, searched: Path) -> None:
    text = run("campaigns", "small", "--store", str(searched)).stdout
    assert "flywheel search --model smollm2-135m --gpu l4" in text
    document = json.loads(run("campaigns", "small", "--store", str(searched), "--json").stdout)
    latencies = [trial["predicted_us"] for trial in document["best"]]
    assert latencies == sorted(latencies)


def test_an_unknown_campaign_is_code_2_with_the_closest_name(run: Run, searched: Path) -> None:
    result = run("campaigns", "smal", "--store", str(searched))
    assert result.exit_code == 2
    assert "did you mean small?" in result.stderr


def test_a_missing_or_broken_store_is_code_5(run: Run) -> None:
    assert run("campaigns").exit_code == 5
    Path("broken.db").write_text("not a database, but long enough to be taken for one" * 40, encoding="utf-8")
    result = run("campaigns", "--store", "broken.db")
    assert result.exit_code == 5
    assert "not a SQLite database" in result.stderr


def test_reasons_of_strangers_are_only_text(run: Run, searched: Path) -> None:
    with open_store(searched) as store:
        row = store.trials("small")[0]
    refused = replace(row, outcome="timed_out", reason="\x1b[31mred", predicted_us=None, predictor=None,
                      floor_fraction=None)  # fmt: skip
    Path("rows.tsv").write_text(to_tsv([refused]), encoding="utf-8")
    assert run("import", "rows.tsv", "--as", "theirs").exit_code == 0
    assert r"trial 0, timed out: \x1b[31mred" in run("campaigns", "theirs").stdout
