from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psycopg
import pytest
from postgres_server import Server
from sqlalchemy import insert

from flywheel.errors import StoreError
from flywheel.measure.record import TrialRecord
from flywheel.store import engine
from flywheel.store.campaign import Campaign
from flywheel.store.places import make_store_url, store_name
from flywheel.store.schema import trials
from flywheel.store.sql import open_store

Records = Callable[..., TrialRecord]
Campaigns = Callable[..., Campaign]


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
    tmp_path: Path, make_record: Records, make_campaign: Campaigns
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
            store.create_campaign(make_campaign(spec=f'{{"x": "{"x" * 1_000_000}"}}'))
    one_line(caught, str(path), "disk is full")


@pytest.mark.parametrize(
    "url",
    [
        ":memory:",
        "sqlite://",
        "sqlite:///file:x?mode=memory&uri=true",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:?uri=true",
    ],
)
def test_a_store_in_memory_is_refused(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    one_line(caught, "is in memory")


def test_a_file_by_its_uri_that_must_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(f"sqlite:///file:{tmp_path}/a%20b.db?uri=true", create=False)
    one_line(caught, "does not exist")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_file_that_goes_away_takes_no_more_rows(
    tmp_path: Path, make_record: Records, make_campaign: Campaigns, replaced: bool
) -> None:
    path = tmp_path / "a.db"
    with open_store(path) as store:
        store.create_campaign(make_campaign())
        path.unlink()
        if replaced:
            path.write_bytes(b"")
        for attempt in (lambda: store.append(make_record()), lambda: store.trials("first")):
            with pytest.raises(StoreError) as caught:
                attempt()
            one_line(caught, str(path), "was removed or replaced")
    assert path.exists() is replaced
    with open_store(path) as store:  # not what the log that is left there says
        assert store.campaigns() == []


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
    assert store_name(url) == "postgresql://lab:***@host/db"


def test_a_password_among_the_parameters_is_never_shown() -> None:
    url = make_store_url("postgresql://host/db?user=lab&password=secret&sslpassword=hidden")
    assert store_name(url) == "postgresql://host/db?user=lab"


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://lab:secret@127.0.0.1:1/db")
    one_line(caught, "lab:***@127.0.0.1:1/db", "Connection refused")
    assert "secret" not in str(caught.value)


def test_a_server_that_does_not_answer_is_not_waited_for_forever(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.create_database()
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 2)
    frozen = postgres_server.pid
    os.kill(frozen, signal.SIGSTOP)
    try:
        with pytest.raises(StoreError) as caught:
            open_store(url)
    finally:
        os.kill(frozen, signal.SIGCONT)
    one_line(caught, "does not answer; waited 2 s")


def test_a_session_that_its_server_ends_is_told_so_and_the_next_one_goes_on(
    postgres_server: Server, make_record: Records, make_campaign: Campaigns
) -> None:
    with open_store(postgres_server.create_database()) as store:
        store.create_campaign(make_campaign())
        with pytest.raises(StoreError) as caught, engine.writing(store._engine, store.name) as connection:
            connection.execute(insert(trials), asdict(make_record()))
            postgres_server.stop()
            connection.execute(insert(trials), asdict(make_record(trial=1)))
        one_line(caught, "lost the connection to its server")
        postgres_server.start()
        assert store.trials("first") == []
        store.append(make_record())
        assert store.trials("first") == [make_record()]


def test_a_table_that_another_session_locked_for_too_long_is_named(
    postgres_server: Server, make_record: Records, make_campaign: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.create_database()
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 1)
    with open_store(url) as store, psycopg.connect(url) as holder:
        store.create_campaign(make_campaign())
        holder.execute("LOCK TABLE trials")
        with pytest.raises(StoreError) as caught:
            store.append(make_record())
        one_line(caught, "is locked by another session; waited 1 s")
        holder.rollback()
        assert store.trials("first") == []


def test_a_full_disk_of_a_server_is_named_and_keeps_whole_rows(
    postgres_server: Server, make_record: Records, make_campaign: Campaigns
) -> None:
    rows = [make_record(trial=trial, reason=random.Random(trial).randbytes(100_000).hex()) for trial in range(30)]
    appended = []
    url = postgres_server.create_database()
    # No whole number of pages: the last write is cut, as on a full disk.
    with postgres_server.files_up_to(2 * 2**20 + 512), open_store(url) as store, pytest.raises(StoreError) as caught:
        store.create_campaign(make_campaign())
        for row in rows:
            store.append(row)
            appended.append(row)
    one_line(caught, "cannot grow: the disk is full")
    with open_store(url, create=False) as store:
        assert store.trials("first") == appended != []
        store.append(rows[len(appended)])


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://lab:secret@host/db")
    one_line(caught, "psycopg is not installed", "[postgres]")
    assert "secret" not in str(caught.value)
