from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from socket import gethostname

import pytest
from click.testing import Result

from flywheel.measure.latency import rounded
from flywheel.search.knobs import REMOVED, REMOVED_VALUES
from flywheel.store.sql import open_store
from flywheel.store.tsv import to_tsv

Run = Callable[..., Result]


def test_campaigns_are_listed_with_outcomes_and_whether_the_best_is_predicted(run: Run, searched: Path) -> None:
    text = run("campaigns", "--store", str(searched)).stdout
    assert len(text.splitlines()) == 2
    assert "small" in text
    assert re.search(r"us  predicted +[\d,]+  +[\d.]+ %  \d{4}-\d\d-\d\d  \S+ +predicted 5", text)
    document = json.loads(run("campaigns", "--store", str(searched), "--json").stdout)
    (campaign,) = document["campaigns"]
    assert (campaign["trials"], campaign["outcomes"], campaign["best_measured_us"]) == (5, {"predicted": 5}, None)
    assert campaign["spec"]["trials"] == 5
    alone = json.loads(run("campaigns", "small", "--store", str(searched), "--json").stdout)
    assert campaign["gained"] == alone["gained"]
    assert campaign["gained"]["seed_us"] is not None
    assert f" {campaign['gained']['over_seed']:.1%} ".replace("%", " %") in text


def test_one_campaign_shows_its_command_and_best_trials(run: Run, searched: Path) -> None:
    text = run("campaigns", "small", "--store", str(searched)).stdout
    assert "flywheel search --model smollm2-135m --gpu l4" in text
    document = json.loads(run("campaigns", "small", "--store", str(searched), "--json").stdout)
    latencies = [trial["predicted_us"] for trial in document["best"]]
    assert latencies == sorted(latencies)
    assert document["hosts"] == [document["best"][0]["host"]]
    assert document["gained"]["best_us"] == latencies[0] <= document["gained"]["seed_us"]
    assert re.search(rf"predicted +{rounded(1e6 / latencies[0])} ", text)  # tokens/s


def test_an_unknown_campaign_is_code_2_with_the_closest_name(run: Run, searched: Path) -> None:
    result = run("campaigns", "smll", "--store", str(searched))
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
    assert run("import", "rows.tsv", "--name", "theirs").exit_code == 0
    assert r"trial 0, timed out: \x1b[31mred" in run("campaigns", "theirs").stdout


def test_the_beginning_of_a_name_names_a_campaign_where_no_other_begins_so(run: Run, store: str) -> None:
    with open_store(store) as opened:
        campaign = opened.campaign("small")
        assert campaign is not None
        for name in ("smaller", "large-1"):
            opened.create_campaign(replace(campaign, name=name))

    assert run("campaigns", "small", "--store", store).stdout.startswith("small: ")
    assert run("campaigns", "smalle", "--store", store).stdout.startswith("smaller: ")
    assert run("campaigns", "la", "--store", store).stdout.startswith("large-1: ")
    several = run("campaigns", "sma", "--store", store)
    assert several.exit_code == 2
    assert "2 campaigns begin with 'sma': " in several.stderr and "small" in several.stderr


def test_without_a_name_a_report_and_an_export_are_of_the_newest_campaign(run: Run, store: str) -> None:
    with open_store(store) as opened:
        campaign = opened.campaign("small")
        assert campaign is not None
        opened.create_campaign(replace(campaign, name="older", created_at="2001-01-01T00:00:00+00:00"))

    assert run("report", "--store", store).stdout.startswith("small.html: ")
    exported = run("export", "--format", "schedule", "--store", store)
    assert exported.stderr.startswith("small, trial ")


def test_without_campaigns_there_is_no_newest_one(run: Run, store: str, tmp_path: Path) -> None:
    with open_store(tmp_path / "empty.db"):
        pass
    result = run("report", "--store", tmp_path / "empty.db")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no campaigns; flywheel search makes one" in result.stderr


def test_a_campaign_is_deleted_only_once_it_is_said_twice(run: Run, store: str) -> None:
    asked = run("campaigns", "small", "--delete", "--store", store)
    assert asked.exit_code == 130  # nobody answered
    assert json.loads(run("campaigns", "--store", store, "--json").stdout)["campaigns"]
    kept = run("campaigns", "small", "--delete", "--store", store, stdin="n\n")
    assert (kept.exit_code, kept.stderr.splitlines()[-1]) == (0, "kept campaign small")
    (there,) = json.loads(run("campaigns", "--store", store, "--json").stdout)["campaigns"]
    assert there["hosts"] == [gethostname()]
    assert f" {gethostname()} " in run("campaigns", "--store", store).stdout
    done = run("campaigns", "small", "--delete", "--yes", "--store", store)
    assert (done.exit_code, done.stderr) == (0, "deleted campaign small, 5 rows\n")
    assert json.loads(run("campaigns", "--store", store, "--json").stdout)["campaigns"] == []
    assert run("campaigns", "--delete", "--store", store).exit_code == 2


@pytest.mark.parametrize("how", [("--delete", "--yes"), ("--archive", "old.tsv")])
def test_the_beginning_of_a_name_deletes_and_archives_nothing(how: tuple[str, ...], run: Run, store: str) -> None:
    result = run("campaigns", "sma", *how, "--store", store)
    assert (result.exit_code, Path("old.tsv").exists()) == (2, False)
    assert result.stderr == "flywheel: campaigns: 'sma' only begins a name; to remove small, give it whole\n"
    assert run("campaigns", "small", "--store", store).exit_code == 0


def test_an_archived_campaign_comes_back_as_it_was(run: Run, store: str) -> None:
    with open_store(store) as opened:
        before = opened.trials("small")
    assert run("campaigns", "small", "--archive", "old.tsv", "--store", store).exit_code == 0
    assert run("campaigns", "small", "--store", store).exit_code == 2
    assert run("import", "old.tsv", "--name", "small", "--store", store).exit_code == 0
    with open_store(store) as opened:
        assert [row.config_id for row in opened.trials("small")] == [row.config_id for row in before]
    again = run("campaigns", "small", "--archive", "old.tsv", "--store", store)
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_a_campaign_that_is_being_searched_stays(run: Run, store: str) -> None:
    with open_store(store) as opened, opened.share("small") as claims:
        claims.claim("0123456789ab", 5, 1)
        refused = run("campaigns", "small", "--delete", "--yes", "--store", store)
        assert refused.exit_code == 5
        assert "is being searched" in refused.stderr
        assert len(opened.trials("small")) == 5
    assert run("campaigns", "small", "--delete", "--yes", "--store", store).exit_code == 0


def pin(store: str, pins: dict[str, str]) -> None:
    """Make the campaign `small` one of an older version, with these pinned knobs."""
    with open_store(store) as opened:
        campaign = opened.campaign("small")
        assert campaign is not None
        older = replace(campaign, spec=json.dumps({**json.loads(campaign.spec), "fix": pins}))
        assert opened.replace_campaign(campaign, older)


AGAIN = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--jobs", "1", "--name", "small")


@pytest.mark.parametrize("name", REMOVED)
def test_a_campaign_that_pins_what_all_searches_do_now_goes_on(name: str, store: str, run: Run) -> None:
    pin(store, {name: REMOVED[name].value})
    text = run("campaigns", "small", "--store", store).stdout
    assert "gained" in text and "--fix" not in text
    again = run(*AGAIN, "--trials", "6", "--store", store)
    assert again.exit_code == 0, again.stderr
    assert re.search(r"campaign +small\n", again.stdout) and "6, 1 of them new" in again.stdout


GONE = {(name, "other"): f"which no search sets any more: {old.now}" for name, old in REMOVED.items()} | {
    pinned: f"which the knob has no more: {now}" for pinned, now in REMOVED_VALUES.items()
}


@pytest.mark.parametrize("name, value", GONE)
def test_a_campaign_that_pins_what_no_search_does_now_says_so_in_one_line(
    name: str, value: str, store: str, run: Run
) -> None:
    pin(store, {name: value})
    text = " ".join(run("campaigns", "small", "--store", store).stdout.split())
    assert "gained" in text and "command" not in text
    assert f"no search goes on with --fix {name}={value}, {GONE[name, value]}" in text
    again = run(*AGAIN, "--trials", "6", "--store", store)
    assert again.exit_code == 2
    (line,) = [line for line in again.stderr.splitlines() if line.startswith("flywheel: campaign ")]
    assert GONE[name, value] in line and line.endswith("; --fresh or --name starts a new one")
    study = run("export", "--format", "optuna", "--campaign", "small", "--store", store, "--output", "study.db")
    assert study.exit_code == 0, study.stderr


def test_a_campaign_with_other_pinned_knobs_is_named_with_both(store: str, run: Run) -> None:
    again = run(*AGAIN, "--fix", "depth=1", "--store", store)
    assert again.exit_code == 2
    assert "campaign 'small' has no --fix; this search has --fix depth=1; --fresh" in again.stderr
