"""Alembic's entry point: runs the migrations on the connection that flywheel.store.migrate hands over."""

from __future__ import annotations

from alembic import context

from flywheel.store.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
