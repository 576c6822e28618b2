from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flywheel.errors import StoreError
from flywheel.measure.record import TrialRecord
from flywheel.store import engine
from flywheel.store.campaign import Campaign
from flywheel.store.engine import make_store_url, store_name
from flywheel.store.sql import open_store


def one_line(caught: pytest.ExceptionInfo[StoreError], *parts: str) -> None:
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_plain_path_is_a_sqlite_file(tmp_path: Path) -> None:
    open_store(tmp_path / "a.db").close()
    open_store(str(tmp_path / "b.db")).close()
    assert (tmp_path / "a.db").read_bytes()[:15] == b"SQLite format 3"
    assert (tmp_path / "b.db").exists()


def test_a_store_logs_ahead_and_waits_for_locks(tmp_path: Path) -> None:
    with open_store(tmp_path / "a.db") as store, store._engine.connect() as connection:
        settings = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "busy_timeout", "foreign_keys", "synchronous")
        ]
    assert settings == ["wal", 30_000, 1, 1]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path / "none" / "a.db")
    one_line(caught, str(tmp_path / "none" / "a.db"), "directory", "does not exist")


def test_a_directory_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path)
    one_line(caught, str(tmp_path), "is a directory")


def test_a_store_that_must_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path / "a.db", create=False)
    one_line(caught, "a.db", "does not exist")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.tsv"
    path.write_text("campaign\ttrial\n" * 100)
    with pytest.raises(StoreError) as caught:
        open_store(path)
    one_line(caught, str(path), "is not a SQLite database")
    assert path.read_text() == "campaign\ttrial\n" * 100


def test_a_read_only_store_is_read_and_refuses_rows(
    tmp_path: Path, make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign]
) -> None:
    path = tmp_path / "a.db"
    with open_store(path) as store:
        store.create_campaign(make_campaign())
        store.append(make_record())
    with open_store(f"sqlite:///file:{path}?mode=ro&uri=true") as store:
        assert store.trials("first") == [make_record()]
        with pytest.raises(StoreError) as caught:
            store.append(make_record(trial=1))
    one_line(caught, str(path), "is read-only")


def test_a_store_locked_for_too_long_is_named(
    tmp_path: Path, make_campaign: Callable[..., Campaign], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    open_store(path).close()
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 0.05)
    holder = sqlite3.connect(path)
    holder.execute("BEGIN IMMEDIATE")
    with open_store(path) as store, pytest.raises(StoreError) as caught:
        store.create_campaign(make_campaign())
    holder.close()
    one_line(caught, str(path), "is locked by another process")


def test_a_full_disk_is_named(tmp_path: Path, make_campaign: Callable[..., Campaign]) -> None:
    path = tmp_path / "a.db"
    with open_store(path) as store, store._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        connection.close()
        with pytest.raises(StoreError) as caught:
            store.create_campaign(make_campaign(spec="x" * 1_000_000))
    one_line(caught, str(path), "disk is full")


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite+aiosqlite:///a.db", "nonsense://"])
def test_another_kind_of_database_is_refused(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    one_line(caught, "not supported")


def test_a_malformed_url_is_refused() -> None:
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://host:port/db")
    one_line(caught, "not a database URL")


def test_a_password_is_never_shown() -> None:
    url = make_store_url("postgresql://lab:secret@host/db")
    assert url.drivername == "postgresql+psycopg"
    assert store_name(url) == "postgresql+psycopg://lab:***@host/db"


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://lab:secret@host/db")
    one_line(caught, "psycopg is not installed", "flywheel[postgres]")
    assert "secret" not in str(caught.value)
