from __future__ import annotations

from pathlib import Path

import pytest

import flywheel
from flywheel.api.frame import to_dataframe
from flywheel.errors import StoreError, UsageError
from flywheel.measure.record import COLUMNS


def test_rows_are_a_table_with_every_column(tmp_path: Path) -> None:
    result = flywheel.search(
        model="smollm2-135m", gpu="h100", measure="predict", trials=3, store=tmp_path / "trials.db"
    )
    table = result.to_dataframe()

    assert list(table.columns) == [column.name for column in COLUMNS]
    assert list(table["trial"]) == [0, 1, 2]
    assert result.best is not None
    assert table["predicted_us"].min() == result.best.predicted_us
    assert table["latency_us"].isna().all()
    with flywheel.open_store(tmp_path / "trials.db") as store:
        (summary,) = store.campaigns()
        assert (summary.campaign.name, summary.trials) == (result.campaign, 3)
        assert to_dataframe(store.trials(result.campaign)).equals(table)


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
