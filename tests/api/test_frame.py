from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rows import config_id_of

import flywheel
from flywheel.api.frame import to_dataframe
from flywheel.errors import StoreError, UsageError
from flywheel.ir import config_from_dict
from flywheel.measure.record import COLUMNS
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.store.tsv import to_tsv

WORK = {"model": "smollm2-135m", "gpu": "h100", "measure": "predict"}



def test_rows_are_a_table_with_every_column(tmp_path: Path) -> None:
    result = flywheel.search(
        **WORK, trials=3, store=tmp_path / "trials.db"
    )
    table = result.to_dataframe()

    assert list(table.columns)[: len(COLUMNS)] == [column.name for column in COLUMNS]
    assert list(table["trial"]) == [0, 1, 2]
    assert result.best is not None
    assert table["predicted_us"].min() == result.best.predicted_us
    assert table["latency_us"].isna().all()
    with flywheel.open_store(tmp_path / "trials.db") as store:
        (summary,) = store.campaigns()
        assert (summary.campaign.name, summary.trials) == (result.campaign, 3)
        assert to_dataframe(store.trials(result.campaign)).equals(table)


def test_every_knob_is_a_column_of_its_type(tmp_path: Path) -> None:
    result = flywheel.search(**WORK, trials=4, store=tmp_path / "trials.db")
    table = result.to_dataframe()
    space = make_space(make_workload("smollm2-135m", "h100", "bf16", 512))
    knobs = [f"knob.{each.name}" for each in space.dimensions]
    assert list(table.columns)[len(COLUMNS) :] == knobs
    rows = flywheel.open_store(result.store).trials(result.campaign)
    for row, (_, shown) in zip(rows, table.iterrows(), strict=True):
        choice = space.to_choice(config_from_dict(json.loads(row.config)))
        assert choice == {name.removeprefix("knob."): shown[name] for name in knobs}
    numbers = {f"knob.{each.name}" for each in space.dimensions if isinstance(each.values[0], int)}
    assert {name for name in knobs if table[name].dtype == "int64"} == numbers
    assert {"knob.depth", "knob.rows.qkv"} <= numbers < set(knobs)


def test_a_knob_that_a_row_lacks_is_missing_and_the_others_stay_integers(tmp_path: Path) -> None:
    store = tmp_path / "trials.db"
    flywheel.search(**WORK, trials=2, name="one", store=store)
    flywheel.search(**WORK, trials=1, name="two", store=store)
    opened = flywheel.open_store(store)
    one, two = opened.trials("one"), opened.trials("two")
    gone = replace(one[0], model="gone")
    strange = replace(one[0], config="{}", config_id=config_id_of("{}"))
    table = flywheel.to_dataframe([*one, *two, gone, strange])
    assert table["knob.depth"].dtype == "Int64"
    assert list(table["knob.depth"].isna()) == [False, False, False, True, True]
    assert table["knob.depth"].max() == max(flywheel.to_dataframe(one + two)["knob.depth"])


def test_a_table_as_text_has_no_knobs(tmp_path: Path) -> None:
    """What `export` writes stays as it was."""
    result = flywheel.search(**WORK, trials=1, store=tmp_path / "trials.db")
    with flywheel.open_store(result.store) as store:
        header = to_tsv(store.trials(result.campaign)).splitlines()[0]
    assert header.split("\t") == [column.name for column in COLUMNS]


def test_no_rows_are_an_empty_table_of_the_same_columns() -> None:
    assert list(flywheel.to_dataframe([]).columns) == [column.name for column in COLUMNS]


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        flywheel.open_store(tmp_path / "nowhere.db")
    assert not (tmp_path / "nowhere.db").exists()


def test_without_pandas_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.api.frame.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^to_dataframe needs pandas: pip install .*\[pandas\]'$"):
        to_dataframe([])
