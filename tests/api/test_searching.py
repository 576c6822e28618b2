from __future__ import annotations

import inspect
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rows import timed

import flywheel
from flywheel.api.searching import SearchResult
from flywheel.api.searching import search as function
from flywheel.cli.main import cli
from flywheel.errors import StoreError, UsageError
from flywheel.search.spec import DEFAULT_TRIALS, METHOD, CampaignSpec
from flywheel.store.schedule import SHIPPED
from flywheel.store.sql import open_store
from flywheel.version import VERSION

WORK = {"model": "smollm2-135m", "gpu": "l4", "measure": "predict"}
search: Callable[..., SearchResult] = flywheel.search


def test_it_takes_what_a_campaign_takes_with_the_same_defaults() -> None:
    parameters = inspect.signature(function).parameters
    known = {field.name: field for field in fields(CampaignSpec)}
    assert parameters.keys() - known.keys() == {"store", "fresh", "watch"}
    assert known.keys() <= parameters.keys()
    for name, field in known.items():
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if name in METHOD:
            assert parameters[name].default is None, name  # a resumed campaign's own
        elif name not in ("fix", "jobs", "gpu", "context", "trials"):  # None: as the GPU, the model and `measure` ask
            assert parameters[name].default == default, name


def test_a_search_returns_its_best_row_and_where_all_rows_are(tmp_path: Path) -> None:
    store, seen = tmp_path / "trials.db", []
    result = search(**WORK, trials=3, name="api", store=store, fix={"depth": 2}, watch=seen.append)
    assert (result.campaign, result.trials, result.new_trials, result.stopped) == ("api", 3, 3, "trials")
    with open_store(result.store, create=False) as opened:
        rows = opened.trials("api")
    assert result.best == min(rows, key=lambda row: row.predicted_us or 0.0)
    assert result.config is not None
    assert result.config.config_id == result.best.config_id
    assert result.config.pipelining_depth == 2
    assert [progress.record for progress in seen] == rows
    again = search(**WORK, trials=4, name="api", store=store, fix={"depth": 2})
    assert (again.trials, again.new_trials) == (4, 1)


def test_predictions_without_a_budget_end_where_those_of_the_command_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is named counts alone."""
    monkeypatch.setattr("flywheel.search.run.PREDICTED_PATIENCE", 3)
    by_command = CliRunner().invoke(cli, ["search", *(f"--{name}={value}" for name, value in WORK.items()), "--jobs=1",
                                          "--store", str(tmp_path / "cli.db"), "--json"])  # fmt: skip
    document = json.loads(by_command.stdout)
    found = search(**WORK, name="api", store=tmp_path / "trials.db")
    assert found.trials < DEFAULT_TRIALS
    assert (found.trials, found.stopped) == (document["trials"], document["stopped"]) == (found.trials, "patience")
    more = search(**WORK, name="api", store=tmp_path / "trials.db", trials=found.trials + 4)
    assert (more.new_trials, more.stopped) == (4, "trials")


@pytest.mark.parametrize(
    ("options", "error"), [({"trials": 0}, UsageError), ({"store": "nowhere/trials.db"}, StoreError)]
)
def test_its_errors_are_flywheel_s(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        search(**{**WORK, **options})


def test_a_resumed_campaign_keeps_its_sampler_seed_and_starts_unless_told_otherwise(tmp_path: Path) -> None:
    store, method = tmp_path / "trials.db", {"sampler": "random", "seed": 7, "seeds": False, "warm": False}
    first = search(**WORK, **method, trials=2, name="api", store=store)
    again = search(**WORK, trials=4, name="api", store=store)
    assert again.new_trials == 2
    with open_store(str(store), create=False) as opened:
        rows = opened.trials("api")
    assert {(row.sampler, row.seed, row.source) for row in rows} == {("random", 7, "search")}
    others = {"sampler": "descent", "seed": 0, "seeds": True, "warm": True}
    for option, value in others.items():
        fact = f"^campaign 'api' has {option}={method[option]}, not {value}; --fresh or --name starts a new one$"
        with pytest.raises(UsageError, match=fact):
            search(**WORK, **{option: value}, trials=6, name="api", store=store)
    assert search(**WORK, **method, trials=4, name="api", store=store).new_trials == 0
    fresh = search(**WORK, sampler="descent", trials=1, name="api", store=store, fresh=True)
    assert (first.campaign, fresh.campaign) == ("api", "api.2")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_flywheel_imports_nothing_of_it_but_its_version() -> None:
    code = "import sys, flywheel; print([m for m in sys.modules if m.startswith('flywheel.')], flywheel.__version__)"
    assert python(code) == f"['flywheel.version'] {VERSION}"


@pytest.mark.parametrize("before", ["", "import flywheel.search.spec; ", "from flywheel.search import campaign; "])
def test_the_name_can_be_called_whatever_was_imported_before(before: str) -> None:
    code = f"{before}import flywheel; print(callable(flywheel.search), flywheel.search.__name__)"
    assert python(code) == "True flywheel.search"


def test_the_signature_is_the_functions() -> None:
    assert inspect.signature(flywheel.search) == inspect.signature(function)


def test_every_public_name_is_there() -> None:
    assert all(hasattr(flywheel, name) for name in flywheel.__all__)


def test_dir_names_every_public_name_before_its_first_use() -> None:
    assert python("import flywheel; print(sorted(set(flywheel.__all__) - set(dir(flywheel))))") == "[]"


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        flywheel.serach  # noqa: B018


def test_load_schedule_is_there_and_starts_nothing_else() -> None:
    assert python("import flywheel; print(flywheel.load_schedule.__module__)") == "flywheel.store.schedule"


def test_a_campaign_of_a_version_without_windows_is_resumed(tmp_path: Path) -> None:
    store = tmp_path / "trials.db"
    search(**WORK, trials=1, name="old", store=store)
    with closing(sqlite3.connect(store)) as opened:
        ((spec,),) = opened.execute("SELECT spec FROM campaigns").fetchall()
        described = json.loads(spec)
        assert described["decoder"].pop("window") is None
        opened.execute("UPDATE campaigns SET spec = ?", [json.dumps(described)])
        opened.commit()
    assert search(**WORK, trials=2, name="old", store=store).trials == 2


SHIPPED_WORK = {"model": "llama3.2-1b", "gpu": "h100", "measure": "predict"}
SHIPPED_NAME = "llama3.2-1b-h100-bf16-c512-b1"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A search that predicts for a work whose schedule is shipped."""
    return search(**SHIPPED_WORK, trials=3, name="guess", store=tmp_path_factory.mktemp("found") / "trials.db")


def test_a_measured_schedule_answers_a_search_that_predicts(found: SearchResult, tmp_path: Path) -> None:
    assert found.answer is not None
    assert found.answer.words == f"shipped schedule {SHIPPED_NAME}"
    assert found.best is not None
    assert found.best.is_predicted
    path = found.save(tmp_path / "best.json")
    assert path.read_bytes() == (SHIPPED / f"{SHIPPED_NAME}.json").read_bytes()


def test_the_best_prediction_is_saved_where_it_is_asked_for_and_a_measurement_is_the_answer(
    found: SearchResult, tmp_path: Path
) -> None:
    """The bytes of the command."""
    assert found.answer is not None
    command = ["export", "--format", "schedule", "--campaign", "guess", "--predicted", "--store", found.store]
    saved = found.save(tmp_path / "guess.json", predicted=True).read_text(encoding="utf-8")
    assert saved == CliRunner().invoke(cli, command).stdout
    assert found.best is not None
    measured = timed(found.best, 900.0)
    with pytest.raises(UsageError, match=r"its best schedule is measured, not predicted$"):
        replace(found, best=measured).save(tmp_path / "none.json", predicted=True)


def test_a_measured_row_of_the_store_is_the_answer_and_saved_as_it_is_exported(
    found: SearchResult, tmp_path: Path
) -> None:
    store = str(tmp_path / "trials.db")
    with open_store(found.store) as source, open_store(store) as mine:
        row, campaign = source.trials("guess")[0], source.campaign("guess")
        assert campaign is not None
        mine.create_campaign(replace(campaign, name="mine", measure="cuda"))
        mine.append(timed(row, 850.0, campaign="mine", predicted_us=None, predictor=None))
    again = search(**SHIPPED_WORK, trials=1, name="guess", store=store)
    assert again.answer is not None
    assert (again.answer.latency_us, again.answer.words) == (850.0, "trial 0 of campaign mine")
    command = ["export", "--format", "schedule", "--campaign", "mine", "--store", store]
    exported = CliRunner().invoke(cli, command).stdout_bytes
    assert again.save(str(tmp_path / "best.json")).read_bytes() == exported


def test_a_best_prediction_is_saved_where_nothing_was_measured(tmp_path: Path) -> None:
    result = search(**WORK, trials=2, store=tmp_path / "trials.db")
    assert result.answer is None
    schedule = flywheel.load_schedule(result.save(tmp_path / "best.json"))
    assert schedule.config == result.config


def test_no_result_is_written_over_its_store(found: SearchResult) -> None:
    before = Path(found.store).read_bytes()
    for end in ("", "-wal"):
        for write in (found.save, found.report):
            with pytest.raises(UsageError, match=r"is a file of the trial store; name another file$"):
                write(f"{found.store}{end}")
    assert Path(found.store).read_bytes() == before


def test_the_report_has_the_commands_bytes(found: SearchResult, tmp_path: Path) -> None:
    page = found.report(tmp_path / "page.html").read_bytes()
    command = ["report", "guess", "--store", found.store, "--output", str(tmp_path / "by_command.html")]
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert (tmp_path / "by_command.html").read_bytes() == page
    assert page.startswith(b"<!doctype html>")


def test_what_searching_gained_is_what_the_command_says(found: SearchResult) -> None:
    command = ["search", "--model", "llama3.2-1b", "--gpu", "h100", "--measure", "predict", "--jobs", "1",
               "--trials", "3", "--name", "guess", "--store", found.store, "--json"]  # fmt: skip
    said = json.loads(CliRunner().invoke(cli, command).stdout)["gained"]
    assert found.gained is not None
    assert (found.gained.over_seed, found.gained.over_start) == (said["over_seed"], said["over_start"])
    assert found.gained.best == found.best


def test_a_path_that_cannot_be_written_is_one_line_and_leaves_no_file(found: SearchResult, tmp_path: Path) -> None:
    for write in (found.save, found.report):
        with pytest.raises(UsageError, match=r"^.*/nowhere/x: cannot be written: No such file or directory$"):
            write(tmp_path / "nowhere" / "x")
    with pytest.raises(UsageError, match=r"no trial has a latency, so there is no schedule to save$"):
        replace(found, best=None, answer=None).save(tmp_path / "best.json")
    assert list(tmp_path.iterdir()) == []


def test_results_rows_and_configs_are_short_lines(found: SearchResult) -> None:
    with flywheel.open_store(found.store) as store:
        (summary,) = store.campaigns()
    results = (found, found.best, found.config, found.answer, found.gained, summary.campaign, summary)
    shown = [repr(each) for each in results]
    assert [line for line in shown if len(line) > 200 or not line.isprintable()] == []
    assert shown[0].startswith("<SearchResult guess: predicted ")
    assert f"us by shipped schedule {SHIPPED_NAME}>" in shown[0]
    assert found.best is not None
    assert shown[1] == f"<TrialRecord 'guess', trial {found.best.trial}: {found.best.took}>"
    assert shown[2] == f"<ScheduleConfig {found.best.config_id}>"
    assert shown[5].startswith("<Campaign guess: llama3.2-1b on h100, bf16, context 512, predict, 20")
    assert shown[6] == f"<CampaignSummary guess: 3 trials, {found.best.took}>"


def test_a_notebook_shows_small_tables_in_which_names_are_text(found: SearchResult) -> None:
    assert found.best is not None
    assert found.config is not None
    for each, fact in (
        (found, SHIPPED_NAME), (found.best, "predicted"), (replace(found.best, model="<script>"), "&lt;script&gt;"),
        (found.config, "threads_per_block"),
    ):  # fmt: skip
        table = ElementTree.fromstring(each._repr_html_())
        assert table.tag == "table"
        assert 4 < len(table.findall(".//tr")) < 30
        assert fact in each._repr_html_()
    assert "<script>" not in replace(found.best, model="<script>")._repr_html_()
    hidden = replace(found, store="postgresql://me:secret@lab/trials")._repr_html_()
    assert "secret" not in hidden
