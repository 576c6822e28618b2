"""A PostgreSQL server that stops answering: every wait for it ends, and its error says after how many seconds."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import HANG_S
from postgres_server import Server

from flywheel.errors import StoreError
from flywheel.store import engine, postgres
from flywheel.store.campaign import Campaign
from flywheel.store.sql import open_store

Campaigns = Callable[..., Campaign]

@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 2)
    monkeypatch.setattr(engine, "ANSWER_S", 3.0)
    monkeypatch.setattr(postgres, "PING_S", 1.0)


@pytest.fixture
def store_url(postgres_server: Server, make_campaign: Campaigns) -> Iterator[str]:
    url = postgres_server.create_database()
    with open_store(url) as store:
        store.create_campaign(make_campaign())
    yield url
    postgres_server.drop_database(url)


def check_given_up(work: Callable[[], Any]) -> None:
    """`work` finds that its server does not answer, which it would else wait for without an end."""
    with pytest.raises(StoreError, match=r"does not answer; waited [23] s"):
        work()


@pytest.mark.usefixtures("impatient")
def test_a_frozen_server_is_given_up_when_a_store_is_opened(postgres_server: Server, store_url: str) -> None:
    with postgres_server.frozen():
        check_given_up(lambda: open_store(store_url))


@pytest.mark.usefixtures("impatient")
def test_a_frozen_server_is_given_up_under_an_idle_connection(postgres_server: Server, store_url: str) -> None:
    with open_store(store_url) as store:
        with postgres_server.frozen():
            check_given_up(lambda: store.trials("first"))
        assert store.campaign("first") is not None


@pytest.mark.usefixtures("impatient")
def test_a_frozen_server_is_given_up_in_the_middle_of_a_transaction(postgres_server: Server, store_url: str) -> None:
    with open_store(store_url) as store:

        def read() -> None:
            with engine.reading(store._engine, store.name) as connection, postgres_server.frozen():
                connection.exec_driver_sql("SELECT 1")

        check_given_up(read)
        assert store.campaign("first") is not None


def test_an_interrupt_ends_the_wait_for_a_frozen_server(
    postgres_server: Server, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ANSWER_S", 10 * HANG_S)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with (
            open_store(store_url) as store,
            engine.reading(store._engine, store.name) as connection,
            postgres_server.frozen(),
        ):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                connection.exec_driver_sql("SELECT 1")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_connection_that_a_restart_has_ended_is_replaced(postgres_server: Server, store_url: str) -> None:
    with open_store(store_url) as store:
        postgres_server.stop()
        postgres_server.start()
        assert store.campaign("first") is not None


def test_a_statement_that_takes_too_long_is_ended_by_the_server(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ANSWER_S", 1.0)
    monkeypatch.setattr(postgres, "bound", lambda *_: None)
    with (
        open_store(store_url) as store,
        pytest.raises(StoreError, match="takes too long; waited 1 s"),
        engine.reading(store._engine, store.name) as connection,
    ):
        connection.exec_driver_sql("SELECT pg_sleep(30)")
