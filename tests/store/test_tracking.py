"""Trackers that are none, that do not answer, and that lie: one line each, without a password, and no endless wait."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from postgres_server import Server

from flywheel.errors import FlywheelError, MirrorError, UsageError
from flywheel.store.follow import Follower
from flywheel.store.mirror import Views
from flywheel.store.mlflow import Mirror
from flywheel.store.sql import open_store
from flywheel.store.tracking import check_answer, check_tracking, shown

SECRET = "s3cret"
VIEWS = Views(lambda rows: [None for _ in rows], lambda campaign, records: {}, lambda *_: (None, {}))


@contextmanager
def server(body: bytes, status: int = 200) -> Iterator[str]:
    """A server that answers everything alike."""

    class Same(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Same)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    made.server_close()


@pytest.fixture
def store_url(tmp_path: Path, make_campaign: Callable[..., Any], make_record: Callable[..., Any]) -> str:
    with open_store(tmp_path / "a.db") as store:
        store.create_campaign(make_campaign())
        store.append(make_record())
    return str(tmp_path / "a.db")


def sync(uri: str, store_url: str) -> None:
    Follower(store_url, Mirror(uri), (), "kept", VIEWS).look(last=True)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", 200), (b"null", 200), (b"[1]", 200), (b"<html>", 200), (bytes(range(256)), 200), (b"a" * 50_000_000, 200)],
    ids=["empty", "null", "list", "html", "bytes", "50 MB"],
)
def test_a_server_that_is_no_mlflow_is_one_line(body: bytes, status: int, store_url: str) -> None:
    with server(body, status) as uri, pytest.raises(MirrorError) as caught:
        sync(uri, store_url)
    assert str(caught.value).startswith(f"MLflow {uri}: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("uri", "fact"),
    [
        ("http://[::1", "the tracking URI 'http://[::1' is not a URL of a server"),
        ("http://", "is not a URL of a server"),
        (f"http://u:{SECRET}@h:{SECRET}", "'http://u:***@...' is not a URL of a server"),
        (f"mysql+pymssql9://u:{SECRET}@h/x", None),
        (f"mysql://u:{SECRET}@h/x", "its driver MySQLdb is not installed"),
        (f"mssql+pymssql://u:{SECRET}@h/x", "is not installed"),
    ],
)
def test_a_uri_that_cannot_be_used_is_one_line_without_its_password(uri: str, fact: str | None, store_url: str) -> None:
    with pytest.raises(FlywheelError) as caught:
        sync(uri, store_url)
    assert SECRET not in str(caught.value)
    assert fact is None or (isinstance(caught.value, UsageError) and fact in str(caught.value))


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        (f"http://u:{SECRET}@h/path?token={SECRET}", "http://u:***@h/path"),
        (f"http://u:p@{SECRET}@h", "http://u:***@h"),
        (f"postgresql:/u:{SECRET}@h", "postgresql:/u:***@h"),
        (f"http://{SECRET}@h", "http://:***@h"),
        (f"postgresql://h:5432/db?user=me&password=p@{SECRET}", "postgresql://***"),
        (f"postgresql://me:{SECRET}?{SECRET}@h/db", "postgresql://***"),
        ("sqlite:////x/mlflow.db", "sqlite:////x/mlflow.db"),
        ("databricks", "databricks"),
        ("http://[::1", "http://[::1"),
    ],
)
def test_a_uri_is_shown_without_what_may_be_secret(uri: str, said: str) -> None:
    assert shown(uri) == said


def test_the_store_itself_is_no_tracking_database(store_url: str, postgres_server: Server) -> None:
    with pytest.raises(UsageError, match="is the store; MLflow's tables need another database"):
        sync(f"sqlite:///{store_url}", store_url)
    url = postgres_server.create_database()
    with pytest.raises(UsageError, match="is the store"):
        check_tracking(url, url)


def test_a_tracking_database_that_does_not_answer_is_given_up(postgres_server: Server, store_url: str) -> None:
    url = postgres_server.create_database().replace("postgresql://", "postgresql+psycopg://")
    with postgres_server.frozen(), pytest.raises(MirrorError, match="does not answer: connection timeout expired"):
        sync(url, store_url)


def test_a_server_that_answers_anything_is_there() -> None:
    with server(b"no", 404) as uri:
        check_answer(uri)
    check_answer("sqlite:///nothing.db")


def test_a_server_that_is_not_there_or_silent_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(MirrorError, match=rf"^MLflow http://me:\*\*\*@127\.0\.0\.1:{port}: does not answer: "):
            check_answer(f"http://me:{SECRET}@127.0.0.1:{port}")
    with pytest.raises(MirrorError, match="refused"):
        check_answer(f"http://127.0.0.1:{port}")
