from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from emulator.bundles import write_checkpoint

from flywheel.cli.chosen import known
from flywheel.errors import UnknownNameError, UsageError
from flywheel.ir import ScheduleConfig, config_to_dict
from flywheel.search.workload import Workload, make_workload
from flywheel.store.sql import open_store

Run = Callable[..., Result]


def qwen(gpu: str = "h200") -> Workload:
    return make_workload("qwen3-0.6b", gpu, "bf16", 512)


def test_without_a_store_the_shipped_schedule_is_taken_and_named() -> None:
    (chosen,) = known([qwen()], None, None)

    assert chosen.origin["file"] == "shipped qwen3-0.6b-h200-bf16-c512-b1.json"
    assert (chosen.origin["config_id"], chosen.origin["exact"]) == (chosen.config.config_id, True)
    (note,) = chosen.notes
    assert note.code == "schedule"
    assert "shipped schedule qwen3-0.6b-h200-bf16-c512-b1.json" in note.text


def test_a_store_that_knows_nothing_of_the_work_falls_back_to_it_unless_a_campaign_is_named(
    tmp_path: Path, searched: Path
) -> None:
    with open_store(tmp_path / "empty.db"):
        pass
    (chosen,) = known([qwen()], str(tmp_path / "empty.db"), None)
    assert chosen.origin["file"].startswith("shipped ")
    with pytest.raises(UnknownNameError, match=r"no measured schedule of qwen3-0\.6b on h200"):
        known([qwen()], str(searched), "small")


def test_work_without_a_shipped_schedule_names_the_search_that_finds_one() -> None:
    with pytest.raises(UnknownNameError, match=r"find one with: flywheel search --model qwen3-0\.6b --gpu h100"):
        known([qwen("h100")], None, None)


@pytest.fixture
def measured(run: Run, tmp_path: Path) -> Path:
    """A store with a measured trial of a checkpoint's decode step: no schedule that anybody ships."""
    folder = write_checkpoint(tmp_path / "small")
    run("search", "--model", folder, "--gpu", "h100", "--dtype", "f32", "--measure", "predict", "--trials", 2,
        "--name", "mine", "--store", tmp_path / "trials.db")  # fmt: skip
    with closing(sqlite3.connect(tmp_path / "trials.db")) as database, database:
        database.execute(
            "UPDATE trials SET outcome = 'measured', latency_us = predicted_us, p10_us = predicted_us, "
            "p90_us = predicted_us, samples = 30 WHERE outcome = 'predicted'"
        )
    return tmp_path / "trials.db"


def test_generate_decodes_by_the_stores_best_wherever_the_store_is_named_and_says_so(
    run: Run, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("generate", "--model", measured.with_name("small"), "--prompt-ids", "1,2", "--max-tokens", 2, "--json")
    said = re.compile(r"flywheel: decoding by trial \d of campaign mine, measured [\d.,]+ us\n")
    assert "decoding by what a search tries first\n" in run(*asked).stderr
    named = run(*asked, "--store", measured)
    assert said.search(named.stderr), named.stderr
    with monkeypatch.context() as patched:
        patched.setenv("FLYWHEEL_STORE", str(measured))
        assert said.search(run(*asked).stderr)
    measured.rename("flywheel.db")
    assert said.search(run(*asked).stderr)
    Path("mine.json").write_text(json.dumps(config_to_dict(ScheduleConfig())), encoding="utf-8")
    given = run(*asked, "--config", "mine.json")
    assert given.exit_code == 0 and "decoding by" not in given.stderr
    assert json.loads(given.stdout)["config_id"] == ScheduleConfig().config_id
    missing = run(*asked, "--store", "missing.db")
    assert (missing.exit_code, missing.stdout, len(missing.stderr.splitlines())) == (5, "", 1)
    assert "missing.db" in missing.stderr


@pytest.mark.parametrize("words", [(), ("--store", "trials.db"), ("--config", "best.json")])
def test_serve_hands_its_store_to_the_decoder(
    words: tuple[str, ...], run: Run, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Noted:
        def __init__(self, make: Any, *_: object) -> None:
            asked.append(make.keywords)

        def start(self) -> None:
            raise UsageError("enough")

        def close(self) -> None:
            return

    monkeypatch.setattr("flywheel.serve.engine.Engine", Noted)
    serve = ("serve", "--model", measured.with_name("small"), "--device", "reference", "--port", 0, *words)
    assert "enough" in run(*serve).stderr
    Path("flywheel.db").touch()
    run(*serve)
    assert [each["store"] for each in asked] == ([words[1]] * 2 if "--store" in words else [None, "flywheel.db"])
    Path("bundle").mkdir()
    Path("bundle", "bundle.json").write_text("{}")
    run("serve", "--model", "bundle", "--port", 0)
    assert asked[2]["store"] is None
