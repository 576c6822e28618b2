"""Bringing a store to this code's schema."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import Final

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    Text,
    column,
    insert,
    inspect,
    select,
    table,
    text,
)

from flywheel.errors import StoreError
from flywheel.ir.show import show
from flywheel.store.engine import BUSY_TIMEOUT_S, reading, reported, writing
from flywheel.store.schema import SCHEMA_VERSION, VERSION_TABLE, metadata
from flywheel.store.vetting import check_tables

_VERSION: Final = select(column("version_num", Text)).select_from(table(VERSION_TABLE))
_ADVISORY_LOCK: Final = 0x666C7977
_NAMED: Final = 5
_RETRY_S: Final = 0.02


def ensure_schema(engine: Engine, name: str, *, create: bool = True) -> None:
    """Create the schema, or migrate an older schema. If the schema is up to date, this takes two short queries.

    Other processes may do the same at the same time. Raises StoreError for a newer schema, for a database with another
    application's tables and, with `create=False`, for a database without a schema; it writes to none of these.
    """
    with reading(engine, name) as connection:
        if engine.dialect.name == "sqlite":
            check_tables(connection, name, {VERSION_TABLE, *metadata.tables})
        version = _read_version(connection)
        if version is None:
            if not create:
                raise StoreError(f"store {name}: is not a flywheel store")
            _check_free(connection, name)
    if version == SCHEMA_VERSION:
        return
    _check_migratable(version, name)
    if engine.dialect.name == "sqlite":
        _enter_wal(engine, name)
    with writing(engine, name) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        version = _read_version(connection)
        if version != SCHEMA_VERSION:
            _check_migratable(version, name)
            if version is None:
                _check_free(connection, name)
                _create(connection)
            else:
                _upgrade(connection, name)


def _read_version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: object = connection.execute(_VERSION).scalar()
    return version if isinstance(version, str | None) else repr(version)


def _check_migratable(version: str | None, name: str) -> None:
    if version is None:
        return
    if not (version.isascii() and version.isdecimal() and len(version) < 10):
        told = f"schema version {show(version)} is not flywheel's"
        raise StoreError(f"store {name}: {told}; this code has {SCHEMA_VERSION}")
    if int(version) > int(SCHEMA_VERSION):
        raise StoreError(
            f"store {name}: schema version {version} is newer than this code's {SCHEMA_VERSION}; upgrade flywheel"
        )


def _check_free(connection: Connection, name: str) -> None:
    """Raises StoreError if tables are in the way. A SQLite file must have no table but that of versions. A PostgreSQL
    schema may be shared, so only the names of our tables must be free there."""
    held = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    taken = sorted(held if connection.dialect.name == "sqlite" else held & set(metadata.tables))
    if taken:
        more = f" and {len(taken) - _NAMED} more" if len(taken) > _NAMED else ""
        raise StoreError(f"store {name}: holds another application's tables: {', '.join(taken[:_NAMED])}{more}")


def _enter_wal(engine: Engine, name: str) -> None:
    """Switch the file to write-ahead logging, for good. SQLite does not wait for the lock here, so this tries again."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    with reported(name), closing(engine.raw_connection()) as connection:
        while True:
            try:
                connection.cursor().execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)


def _create(connection: Connection) -> None:
    """Make in an empty database what all migrations together would make, without importing alembic, which is slow."""
    metadata.create_all(connection)
    versions = Table(VERSION_TABLE, MetaData(), Column("version_num", String(32), primary_key=True))
    versions.create(connection, checkfirst=True)
    connection.execute(insert(versions), {"version_num": SCHEMA_VERSION})


def _upgrade(connection: Connection, name: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", "flywheel.store:migrations")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreError(f"store {name}: cannot migrate to schema version {SCHEMA_VERSION}: {error}") from error
