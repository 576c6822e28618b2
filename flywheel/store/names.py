"""The names of a store's campaigns, at once or not at all: for a shell that completes a word."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Final

from sqlalchemy import create_engine, text

from flywheel.store.engine import reported
from flywheel.store.places import file_of, make_store_url, store_name

MOST: Final = 200
"""Names, those of the newest campaigns."""
WAIT_S: Final = 2
"""Seconds to wait for a server or a lock, and for the answer."""
_STEPS: Final = 10**6
"""Steps of SQLite's virtual machine for all names, which take some thousands; a view in place of the table may take any
number."""

_NAMES: Final = f"SELECT name FROM campaigns ORDER BY created_at DESC LIMIT {MOST}"


def campaign_names(url: str) -> list[str]:
    """The names, the newest campaign's first. Writes nothing, and so migrates nothing.

    Raises StoreError where the store is not there, is of another program, or does not answer in time.
    """
    where = make_store_url(url)
    name = store_name(where)
    if where.get_backend_name() == "sqlite":
        path = file_of(where)
        if path is None:
            return []
        place = f"{path.resolve().as_uri()}?mode=ro"
        with reported(name), closing(sqlite3.connect(place, timeout=WAIT_S, uri=True)) as file:
            file.set_progress_handler(lambda: 1, _STEPS)
            return [found for (found,) in file.execute(_NAMES) if isinstance(found, str)]
    from flywheel.store.postgres import bound, limits

    engine = create_engine(where, connect_args=limits(WAIT_S, WAIT_S))
    bound(engine, WAIT_S)
    with reported(name), engine.connect() as connection:
        return list(connection.scalars(text(_NAMES)))
