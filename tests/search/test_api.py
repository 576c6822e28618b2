from __future__ import annotations

import inspect
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import flywheel
from flywheel.errors import StoreError, UsageError
from flywheel.search.api import SearchResult
from flywheel.search.api import search as function
from flywheel.search.spec import METHOD, CampaignSpec
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
        elif name not in ("fix", "jobs", "gpu", "context"):  # None: the GPU here, and as much as the model has
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
