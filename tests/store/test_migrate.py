from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from postgres_server import Server
from sqlalchemy import MetaData, inspect, text

import flywheel
from flywheel.errors import StoreError
from flywheel.measure.record import COLUMNS, TrialRecord
from flywheel.store.campaign import Campaign
from flywheel.store.engine import make_engine, reading, writing
from flywheel.store.schema import SCHEMA_VERSION, VERSION_TABLE, metadata, trials
from flywheel.store.sql import open_store

SCRIPTS = Config()
SCRIPTS.set_main_option("script_location", "flywheel.store:migrations")
REVISIONS = [script.revision for script in ScriptDirectory.from_config(SCRIPTS).walk_revisions()][::-1]


def test_the_migrations_lead_to_the_schema(store_url: str) -> None:
    with open_store(store_url) as store, store._engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == SCHEMA_VERSION


def test_the_schema_version_is_the_newest_migration() -> None:
    assert REVISIONS[-1] == SCHEMA_VERSION


def test_the_trials_table_keeps_the_documented_column_order() -> None:
    assert [column.name for column in trials.columns] == ["id", *(column.name for column in COLUMNS)]


@pytest.mark.parametrize(
    ("version", "fact"),
    [
        ("0099", rf": schema version 0099 is newer than this code's {SCHEMA_VERSION}; upgrade flywheel$"),
        ("v3.0.0.d", r": schema version 'v3\.0\.0\.d' is not flywheel's"),
    ],
    ids=["newer", "foreign"],
)
def test_a_schema_version_from_elsewhere_is_refused(store_url: str, version: str, fact: str) -> None:
    with open_store(store_url) as store, writing(store._engine, store.name) as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = :version"), {"version": version})
    with pytest.raises(StoreError, match=fact):
        open_store(store_url)


def test_another_applications_tables_of_the_same_name_are_left_alone(store_url: str) -> None:
    engine, name = make_engine(store_url, create=True)
    with writing(engine, name) as connection:
        connection.execute(text("CREATE TABLE trials (number INTEGER)"))
    with pytest.raises(StoreError, match="holds another application's tables: trials"):
        open_store(store_url)
    with reading(engine, name) as connection:
        assert inspect(connection).get_table_names() == ["trials"]
    engine.dispose()


def test_a_server_may_hold_another_applications_tables_beside_the_store(postgres_server: Server) -> None:
    url = postgres_server.create_database()
    engine, name = make_engine(url, create=True)
    with writing(engine, name) as connection:
        connection.execute(text("CREATE TABLE foo (number INTEGER)"))
    engine.dispose()
    with pytest.raises(StoreError, match="is not a flywheel store"):
        open_store(url, create=False)
    with open_store(url) as store:
        assert store.campaigns() == []


def foreign(path: Path) -> bytes:
    """A file of another application, and its bytes."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE foo (number INTEGER)")
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("create", "fact"), [(False, "is not a flywheel store"), (True, "holds another application's tables: foo")]
)
def test_another_applications_file_is_not_written_to(tmp_path: Path, create: bool, fact: str) -> None:
    path = tmp_path / "other.db"
    before = foreign(path)
    with pytest.raises(StoreError, match=rf"other\.db: {fact}"):
        open_store(path, create=create)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_becomes_a_store_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(StoreError, match="is not a flywheel store"):
        open_store(path, create=False)
    assert path.read_bytes() == b""
    open_store(path).close()
    with open_store(path, create=False) as store:
        assert store.campaigns() == []


def test_a_creation_that_fails_leaves_nothing_behind(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import op

    def fail(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(op, "create_index", fail)
    with pytest.raises(StoreError, match="disk is full"):
        open_store(store_url)
    monkeypatch.undo()
    engine, name = make_engine(store_url, create=False)
    with reading(engine, name) as connection:
        assert inspect(connection).get_table_names() == []
    engine.dispose()
    with open_store(store_url) as store:
        assert store.campaigns() == []


def test_an_up_to_date_store_opens_without_alembic(tmp_path: Path) -> None:
    open_store(tmp_path / "a.db").close()
    code = (
        "import sys; from flywheel.store.sql import open_store; "
        "open_store(sys.argv[1]).close(); sys.exit('alembic' in sys.modules)"
    )
    root = Path(flywheel.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.db")], cwd=root, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_store_of_every_released_schema_keeps_its_rows(
    store_url: str, revision: str, make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign]
) -> None:
    released = make_store_of(revision, store_url, make_campaign(), [make_record(trial=0), make_record(trial=1)])
    with open_store(store_url, create=False) as store:
        assert store.campaign("first") == make_campaign()
        assert store.trials("first") == [make_record(trial=0), make_record(trial=1)]
        full = make_record("measured", trial=2, kernels="feed", l2_state="warm", samples=9)
        store.append(full)
        assert store.trials("first")[2] == full
    assert released <= {column.name for column in COLUMNS}
    assert ("kernels" in released) is (revision > "0001")


def test_coordinators_that_migrate_one_store_at_once_all_find_it_migrated(
    store_url: str, make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign]
) -> None:
    make_store_of(REVISIONS[0], store_url, make_campaign(), [make_record()])

    def migrate(_: int) -> list[TrialRecord]:
        with open_store(store_url) as store:
            return store.trials("first")

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(migrate, range(4))) == [[make_record()]] * 4


def make_store_of(revision: str, url: str, campaign: Campaign, records: list[TrialRecord]) -> set[str]:
    """Create a store as it was at a revision, with these rows; the columns that its trials have."""
    engine, name = make_engine(url, create=True)
    with writing(engine, name) as connection:
        SCRIPTS.attributes["connection"] = connection
        command.upgrade(SCRIPTS, revision)
        released = MetaData()
        released.reflect(connection)
        connection.execute(released.tables["campaigns"].insert(), asdict(campaign))
        old = released.tables["trials"]
        columns = set(old.columns.keys()) - {"id"}
        for record in records:
            values = {name: value for name, value in asdict(record).items() if name in columns}
            connection.execute(old.insert(), values)
    engine.dispose()
    return columns
