from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from flywheel.store.sql import open_store

Run = Callable[..., Result]
SEARCH = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--jobs", "1", "--name", "c")
DOCUMENTED = Path(__file__).parents[2] / "docs" / "reference.md"


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_search_streams_its_start_its_trials_its_bests_and_its_end(run: Run) -> None:
    result = run(*SEARCH, "--trials", "4", "--jsonl")
    assert result.exit_code == 0, result.stderr
    start, *middle, end = events(result)
    assert (start["event"], start["version"], start["campaign"], start["known"]) == ("start", 1, "c", 0)
    assert (end["event"], end["stopped"], end["new_trials"]) == ("end", "trials", 4)
    trials = [event for event in middle if event["event"] == "trial"]
    with open_store("flywheel.db", create=False) as store:
        rows = store.trials("c")
    assert [event["config_id"] for event in trials] == [row.config_id for row in rows]
    assert [event["predicted_us"] for event in trials] == [row.predicted_us for row in rows]
    assert "trial" in result.stderr


def test_a_best_follows_the_trial_that_it_is_and_only_falls(run: Run) -> None:
    found = events(run(*SEARCH, "--trials", "6", "--jsonl"))
    bests = [(before, event) for before, event in pairwise(found) if event["event"] == "best"]
    assert bests
    assert all({**before, "event": "best"} == event for before, event in bests)
    latencies = [event["predicted_us"] for _, event in bests]
    assert latencies == sorted(latencies, reverse=True)
    assert found[-1]["best"]["trial"] == bests[-1][1]["trial"]


def test_the_end_is_what_json_says(run: Run) -> None:
    *_, end = events(run(*SEARCH, "--trials", "2", "--jsonl"))
    document = json.loads(run(*SEARCH, "--trials", "2", "--json").stdout)
    volatile = ("elapsed_s", "new_trials", "event")
    assert {k: v for k, v in end.items() if k not in volatile} == {
        k: v for k, v in document.items() if k not in volatile
    }


def test_lines_win_over_a_document_that_the_environment_asks_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYWHEEL_JSON", "1")
    first, *_ = events(run(*SEARCH, "--trials", "1", "--jsonl"))
    assert first["event"] == "start"


def test_a_line_is_there_before_the_next_trial_is_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flywheel", *SEARCH, "--trials", "500", "--jsonl"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert process.poll() is None
        process.terminate()
        rest = process.stdout.read().splitlines()
    assert [line["event"] for line in lines] == ["start", "trial", "best"]
    assert json.loads(rest[-1])["stopped"] == "interrupted"
    assert process.returncode == 130


def test_every_field_is_documented(run: Run) -> None:
    text = DOCUMENTED.read_text(encoding="utf-8")
    section = text[text.index("## Events") :]
    section = section[: section.index("\n## ", 4)]
    for event in events(run(*SEARCH, "--trials", "1", "--jsonl")):
        for name in event:
            assert f"`{name}`" in section, f"{event['event']}.{name}"
