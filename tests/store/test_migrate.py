from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import flywheel
from flywheel.errors import StoreError
from flywheel.measure.record import COLUMNS
from flywheel.store.schema import SCHEMA_VERSION, VERSION_TABLE, metadata, trials
from flywheel.store.sql import open_store


def test_the_migrations_lead_to_the_schema(tmp_path: Path) -> None:
    with open_store(tmp_path / "a.db") as store, store._engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == SCHEMA_VERSION


def test_the_schema_version_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", "flywheel.store:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == SCHEMA_VERSION


def test_the_trials_table_keeps_the_documented_column_order() -> None:
    assert [column.name for column in trials.columns] == ["id", *(column.name for column in COLUMNS)]


def test_a_newer_store_is_refused_by_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0099'")
    connection.close()
    with pytest.raises(StoreError, match=rf"a\.db: schema version 0099 is newer than this code's {SCHEMA_VERSION}"):
        open_store(path)


def test_another_applications_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = 'v3.0.0.d'")
    connection.close()
    with pytest.raises(StoreError, match=r"'v3\.0\.0\.d' is not flywheel's"):
        open_store(path)


def test_another_applications_trials_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "optuna.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE trials (number INTEGER)")
    connection.close()
    with pytest.raises(StoreError, match="holds another application's tables: trials"):
        open_store(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("trials",)]
    connection.close()


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


def test_a_creation_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import op

    def fail(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(op, "create_index", fail)
    with pytest.raises(StoreError, match="disk is full"):
        open_store(tmp_path / "a.db")
    monkeypatch.undo()
    with open_store(tmp_path / "a.db") as store:
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
