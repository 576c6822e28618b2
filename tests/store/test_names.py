from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flywheel.errors import StoreError
from flywheel.store.campaign import Campaign
from flywheel.store.names import MOST, campaign_names
from flywheel.store.sql import open_store


def test_names_are_those_of_the_newest_campaigns(store_url: str, make_campaign: Callable[..., Campaign]) -> None:
    with open_store(store_url) as store:
        for number in range(MOST + 2):
            day = f"2026-{number // 28 % 12 + 1:02}-{number % 28 + 1:02}T00:00:00+00:00"
            store.create_campaign(make_campaign(f"c{number}", created_at=day))
    names = campaign_names(store_url)
    assert len(names) == MOST and names[0] == f"c{MOST + 1}" and {"c0", "c1"}.isdisjoint(names)


def test_reading_names_writes_nothing(tmp_path: Path, make_campaign: Callable[..., Campaign]) -> None:
    path = tmp_path / "t.db"
    with open_store(path) as store:
        store.create_campaign(make_campaign("first"))
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    assert campaign_names(str(path)) == ["first"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    with pytest.raises(StoreError):
        campaign_names(str(tmp_path / "none.db"))
    assert not (tmp_path / "none.db").exists()


def test_a_table_that_never_ends_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with closing(sqlite3.connect(path)) as file:
        file.execute(
            "CREATE VIEW campaigns AS WITH RECURSIVE n(name, created_at) AS"
            " (SELECT 1, 1 UNION ALL SELECT name + 1, 1 FROM n) SELECT name, created_at FROM n"
        )
    start = time.monotonic()
    with pytest.raises(StoreError):
        campaign_names(str(path))
    assert time.monotonic() - start < 2
