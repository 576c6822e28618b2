"""A SQLite file of a stranger is tables with rows, or is refused before anything in it computes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from stores_that_compute import SHARED, TRAPS, spring

from flywheel.errors import StoreError
from flywheel.measure.record import TrialRecord
from flywheel.store import vetting
from flywheel.store.campaign import Campaign
from flywheel.store.sql import open_store

MOST_S = 10.0


@pytest.fixture
def path(tmp_path: Path, make_campaign: Callable[..., Campaign]) -> Path:
    found = tmp_path / "store.db"
    with open_store(found) as store:
        store.create_campaign(make_campaign("c"))
    return found


@pytest.mark.parametrize("trap", TRAPS)
def test_a_store_that_computes_is_refused_at_once_in_one_line(trap: str, path: Path) -> None:
    spring(path, trap)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"^store \S+store\.db: .*(computed|only tables|have none|malformed)") as told:
        open_store(path)
    assert time.monotonic() - began < MOST_S
    assert "\n" not in str(told.value)


def test_names_of_tables_are_found_in_any_case(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("ALTER TABLE trials RENAME TO old; CREATE VIEW TriAls AS SELECT * FROM old")
    with pytest.raises(StoreError, match="'TriAls' is a view"):
        open_store(path)


def test_what_stands_beside_the_tables_of_a_store_is_no_trouble(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE mine (a INTEGER CHECK (a > 0)); CREATE VIEW some AS SELECT * FROM mine;"
            "CREATE INDEX more ON trials (model, dtype)"
        )
    with open_store(path) as store:
        assert [summary.campaign.name for summary in store.campaigns()] == ["c"]


def test_a_query_ends_after_as_many_steps_as_its_file_has_work_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files that are too large for a check of all pages."""
    monkeypatch.setattr(vetting, "_CHECKED_BYTES", 0)
    spring(path, SHARED)
    began = time.monotonic()
    with open_store(path) as store, pytest.raises(StoreError, match="takes more steps than its file has work for"):
        store.campaigns()
    assert time.monotonic() - began < MOST_S


def test_a_store_of_many_rows_stays_far_below_the_bound_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_record: Callable[..., TrialRecord],
    make_campaign: Callable[..., Campaign],
) -> None:  # fmt: skip
    """Whatever the number of rows: a fifth of what each byte allows is enough by itself."""
    with open_store(tmp_path / "store.db") as store:
        store.append_all([make_record("rejected", trial=1)], make_campaign("first"))
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        others = [
            f'"{row[1]}"' for row in connection.execute("PRAGMA table_info(trials)") if row[1] not in ("id", "trial")
        ]
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) "
            f"INSERT INTO trials (trial, {', '.join(others)}) SELECT i, {', '.join(others)} FROM n, trials"
        )
        connection.commit()
    monkeypatch.setattr(vetting, "_LEAST_STEPS", 0)
    monkeypatch.setattr(vetting, "_STEPS_A_BYTE", vetting._STEPS_A_BYTE / 5)
    with open_store(tmp_path / "store.db") as store:
        assert store.campaigns()[0].outcomes == {"rejected": 20_000}
        assert store.best(measured=True) is None
        assert len(store.trials("first")) == 20_000
