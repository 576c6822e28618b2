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
from flywheel.store import migrate
from flywheel.store.campaign import Campaign
from flywheel.store.engine import make_engine, reading, writing
from flywheel.store.schema import SCHEMA_VERSION, VERSION_TABLE, metadata, trials
from flywheel.store.sql import open_store

SCRIPTS = Config()
SCRIPTS.set_main_option("script_location", "flywheel.store:migrations")
REVISIONS = [script.revision for script in ScriptDirectory.from_config(SCRIPTS).walk_revisions()][::-1]


@pytest.mark.parametrize("migrated", [False, True])
def test_a_new_store_and_the_migrations_lead_to_the_same_schema(store_url: str, migrated: bool) -> None:
    if migrated:
        engine, _ = make_engine(store_url, create=True)
        with engine.begin() as connection:
            migrate._upgrade(connection, "a store")
        engine.dispose()
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
    def fail(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(migrate, "insert", fail)  # of the version, behind all tables
    with pytest.raises(StoreError, match="disk is full"):
        open_store(store_url)
    monkeypatch.undo()
    engine, name = make_engine(store_url, create=False)
    with reading(engine, name) as connection:
        assert inspect(connection).get_table_names() == []
    engine.dispose()
    with open_store(store_url) as store:
        assert store.campaigns() == []


@pytest.mark.parametrize("new", [False, True])
def test_a_new_or_up_to_date_store_opens_without_alembic(tmp_path: Path, new: bool) -> None:
    if not new:
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


@pytest.mark.parametrize(
    ("name", "spec", "batch"),
    [
        ("first", '{"batch": 4}', 4),
        ("llama3-8b-h200-bf16-c512-b8-cuda-local-s0", "{}", 8),
        ("llama3-8b-h200-bf16-c512-b8-cuda-local-s0", '{"batch": 1}', 1),
        ("llama3-8b-h200-bf16-c512-cuda-local-s0", "{}", 1),
    ],
)
def test_a_migration_fills_batches_from_what_specs_and_names_told(
    store_url: str, name: str, spec: str, batch: int,
    make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign],
) -> None:  # fmt: skip
    records = [make_record(campaign=name, trial=number) for number in range(2)]
    make_store_of("0003", store_url, make_campaign(name, spec=spec), records)
    with open_store(store_url, create=False) as store:
        found = store.campaign(name)
        assert found is not None
        assert found.batch == batch
        assert [record.batch for record in store.trials(name)] == [batch, batch]
        assert (store.best(measured=False, batch=batch) is None, store.best(measured=False, batch=7)) == (False, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"latency_us": 1.0, "p10_us": 9.0, "p90_us": 0.5, "floor_us": 514.0, "floor_fraction": 514.0},
         "latency_us 1.0, p10_us 9.0, p90_us 0.5"),
        ({"floor_us": 2000.0, "floor_fraction": 2.0}, "floor_us 2000.0"),
        ({"floor_us": 500.0, "floor_fraction": 0.9}, "floor_fraction 0.9"),
        ({"samples": None}, "latency_us 1000.25"),
        ({"rival_us": 1.0, "gain_low_us": 2.0, "gain_high_us": 1.0, "source": "final"}, "gain_low_us 2.0"),
    ],
)  # fmt: skip
def test_a_row_whose_numbers_cannot_all_be_true_is_set_aside_and_keeps_them_in_its_reason(
    store_url: str, changes: dict[str, object], said: str,
    make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign],
) -> None:  # fmt: skip
    make_store_of("0003", store_url, make_campaign(), [make_record("measured")], **changes)
    with open_store(store_url, create=False) as store:
        (row,) = store.trials("first")
        assert (row.outcome, row.latency_us, row.floor_fraction) == ("implausible", None, None)
        assert row.reason is not None
        assert row.reason.startswith("these numbers cannot all be true: outcome measured, ")
        assert said in row.reason
        assert store.best(measured=True) is None


def test_memory_that_was_not_free_once_rejects_no_program_any_more(
    store_url: str, make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign]
) -> None:
    reasons = ("[gpu-memory] GPU memory: 9 bytes requested", "[load] grid of 140 blocks")
    records = [make_record("rejected", trial=trial, reason=reason) for trial, reason in enumerate(reasons)]
    make_store_of("0003", store_url, make_campaign(), records)
    with open_store(store_url, create=False) as store:
        assert [record.outcome for record in store.trials("first")] == ["no_memory", "rejected"]


def test_rows_that_can_be_true_are_left_as_they_were(
    store_url: str, make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign]
) -> None:
    records = [
        make_record("measured", floor_us=700.0, rival_us=1.0, gain_low_us=-2.0, gain_high_us=1.0),
        make_record("predicted", trial=1, floor_us=900.5),
        make_record("rejected", trial=2, floor_us=700.0),
    ]
    make_store_of("0003", store_url, make_campaign(), records)
    with open_store(store_url, create=False) as store:
        assert store.trials("first") == records


def test_the_laptop_chip_that_was_called_rtx5090_is_told_from_the_desktop_card(
    store_url: str, make_record: Callable[..., TrialRecord], make_campaign: Callable[..., Campaign]
) -> None:
    campaign = make_campaign(gpu="rtx5090", spec='{"gpu": "rtx5090", "trials": 3}')
    make_store_of("0003", store_url, campaign, [make_record(gpu="rtx5090")])
    with open_store(store_url, create=False) as store:
        found = store.campaign("first")
        assert found is not None
        assert (found.gpu, found.spec) == ("rtx5090-laptop", '{"gpu": "rtx5090-laptop", "trials": 3}')
        assert [record.gpu for record in store.trials("first")] == ["rtx5090-laptop"]


def make_store_of(
    revision: str, url: str, campaign: Campaign, records: list[TrialRecord], **changes: object
) -> set[str]:
    """Create a store as it was at a revision, with these rows, changed as no TrialRecord could be; the columns that its
    trials have."""
    engine, name = make_engine(url, create=True)
    with writing(engine, name) as connection:
        SCRIPTS.attributes["connection"] = connection
        command.upgrade(SCRIPTS, revision)
        released = MetaData()
        released.reflect(connection)
        campaigns, old = released.tables["campaigns"], released.tables["trials"]
        columns = set(old.columns.keys()) - {"id"}
        described = asdict(campaign).items()
        connection.execute(campaigns.insert(), {name: value for name, value in described if name in campaigns.columns})
        for record in records:
            row = asdict(record) | changes
            connection.execute(old.insert(), {name: value for name, value in row.items() if name in columns})
    engine.dispose()
    return columns
