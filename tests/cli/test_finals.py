"""A campaign that was measured and had its final: every command names the same best, and counts the same trials."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from rows import timed

import flywheel
from flywheel.cli.events import JsonLines
from flywheel.cli.progress import PlainLines
from flywheel.measure.record import TrialRecord
from flywheel.search.campaign import Progress
from flywheel.store.sql import open_store
from flywheel.store.tsv import to_tsv

Run = Callable[..., Result]
TRIALS, BEST = 5, 6


@pytest.fixture
def measured(run: Run, searched: Path) -> list[TrialRecord]:
    """The campaign `gpu` in flywheel.db: five trials, of which number 4 is fast by chance, and a final of the first
    two, of which the second, row 6, wins by less than the noise."""
    with open_store(searched, create=False) as store:
        rows = store.trials("small")
    trials = [timed(row, 3000.0 + row.trial, predicted_us=None, predictor=None, nvrtc="13") for row in rows]
    trials[4] = timed(trials[4], 2999.0, rival_us=2999.5, gain_low_us=-1.0, gain_high_us=2.0)
    finals = [
        timed(row, us, trial=TRIALS + row.trial, source="final", rival_us=3100.0, gain_low_us=-1.0, gain_high_us=1.0,
              created_at=trials[-1].created_at)
        for row, us in zip(trials, (3101.0, 3100.0), strict=False)
    ]  # fmt: skip
    records = trials + finals
    Path("rows.tsv").write_text(to_tsv(records), encoding="utf-8")
    result = run("import", "rows.tsv", "--name", "gpu")
    assert result.exit_code == 0, result.stderr
    assert "5 imported trials, 5 of them new" in result.stdout
    with closing(sqlite3.connect("flywheel.db")) as connection, connection:  # as if they were of this store
        connection.execute("UPDATE trials SET imported_from = NULL")
    return [replace(record, campaign="gpu") for record in records]


def test_every_command_names_the_final_s_best(run: Run, measured: list[TrialRecord]) -> None:
    schedule = json.loads(run("export", "--format", "schedule", "--campaign", "gpu").stdout)
    assert (schedule["provenance"]["trial"], schedule["measured"]["median_us"]) == (BEST, 3100.0)
    assert run("export", "--format", "schedule", "--campaign", "gpu").stderr.startswith("gpu, final 6: ")
    assert (schedule["measured"]["gain_low_us"], schedule["measured"]["gain_high_us"]) == (-1.0, 1.0)
    shown = json.loads(run("campaigns", "gpu", "--json").stdout)
    assert [row["trial"] for row in shown["best"]] == [6, 5, 4, 2, 3]
    assert (shown["tied"], shown["trials"], shown["outcomes"]) == ([5], TRIALS, {"measured": TRIALS})
    (listed,) = json.loads(run("campaigns", "--json").stdout)["campaigns"]
    assert listed["best_measured_us"] == 3100.0
    assert listed["gained"] == shown["gained"] and shown["gained"]["best_us"] == 3100.0
    assert "with final 5 (3,101.0 us): the difference is within the noise" in run("campaigns", "gpu").stdout
    text = " ".join(run("campaigns", "gpu").stdout.split())
    assert " 6 3,100.0 us measured " in text and " final of trial 1 " in text
    verdict = run("evaluate", "-", "--measure", "predict", stdin=json.dumps(schedule))
    assert verdict.exit_code == 0
    assert "by this schedule, on" in verdict.stdout
    answer = flywheel.evaluate(config=schedule, measure="predict", store="flywheel.db").answer
    assert answer is not None
    assert answer.words == f"final {BEST} of campaign gpu"


def test_a_report_and_a_table_count_its_trials(run: Run, measured: list[TrialRecord]) -> None:
    assert json.loads(run("report", "gpu", "--json").stdout)["trials"] == TRIALS
    page = Path("gpu.html").read_text(encoding="utf-8")
    assert "3,100.0 us a token</b>best, measured" in page
    assert "Tied with final 5" in page
    assert '<td class="n">6</td>' in page and "<td>final of trial 1</td>" in page
    results = json.loads(run("export", "--format", "t4", "--campaign", "gpu").stdout)["results"]
    times = [{each["name"]: each["value"] for each in result["measurements"]}["time"] for result in results]
    assert times == pytest.approx([3.101, 3.1, 3.002, 3.003, 2.999])


def test_its_table_comes_back_whole(run: Run, measured: list[TrialRecord]) -> None:
    assert run("export", "--format", "tsv", "--campaign", "gpu").stdout == to_tsv(measured)


def test_a_final_is_an_event_of_its_own(measured: list[TrialRecord], capsys: pytest.CaptureFixture[str]) -> None:
    lines = JsonLines(PlainLines())
    lines._reporter.watch = lambda progress: None  # type: ignore[method-assign]
    for record in measured[4:]:
        lines.watch(Progress(record, measured[BEST], {}, TRIALS, TRIALS, 1.0, record is measured[BEST]))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["event"], event["trial"], event["trials"]) for event in found] == [
        ("trial", 4, TRIALS), ("final", 5, TRIALS), ("final", 6, TRIALS), ("best", 6, TRIALS),
    ]  # fmt: skip
