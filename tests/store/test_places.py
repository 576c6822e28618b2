"""What a path or a URL of a store means, and that a wrong one is one line without a password."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from effort import LONG as TAKES_LONG

from flywheel.errors import StoreError
from flywheel.store import sql
from flywheel.store.campaign import Campaign
from flywheel.store.places import make_store_url, store_name
from flywheel.store.sql import open_store

ROOT = Path(__file__).parents[2]
SECRET = "s3cret"
LONG = 300 * "a"
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


@pytest.mark.parametrize(
    "text", ["x.db", "sqlite:x.db", "sqlite:///x.db", "SQLITE:///x.db", "sqlite:///x.db?timeout=5"]
)
def test_a_file_has_several_names(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(text).close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.db"]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("sqlite://x.db", "a path follows sqlite:///"),
        ("sqlite:///x.db?timeout=abc", "parameter timeout must be a number of seconds"),
        ("sqlite:///x.db?uri=maybe", "parameter uri must be true or false"),
        ("sqlite:///x.db?mode=ro", "parameter mode needs a file: URI and uri=true"),
        ("sqlite:///x.db?foo=1", "no parameter 'foo'; there are uri, mode"),
        ("sqlite:///x%00y.db", "no file has a control character"),
        ("x\x1by.db", "no file has a control character"),
        (f"{LONG}.db", "cannot be opened: File name too long"),
        (f"sqlite:///{LONG}.db", "cannot be opened: File name too long"),
        ("mysql://host/db", "mysql is not supported; use sqlite or postgresql"),
        ("postgresql://127.0.0.1:1/db?foo=1", "libpq has no parameter 'foo'"),
        ("postgresql://127.0.0.1:1/db?connect_timeout=abc", "connect_timeout"),
        ("postgresql://127.0.0.1:99999/db", "port"),
    ],
)
def test_a_place_that_is_none_is_one_short_line(
    text: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as caught:
        open_store(text)
    message = str(caught.value)
    assert message.startswith("store")
    assert fact in message and "\n" not in message and len(message) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://lab:{SECRET}@127.0.0.1:1/db",
        f"postgresql://lab:p@{SECRET}@127.0.0.1:1/db",
        f"postgresql://lab:p/{SECRET}@127.0.0.1:1/db",
        f"postgresql:/lab:{SECRET}@127.0.0.1:1/db",
        f"postgresql:lab:{SECRET}@127.0.0.1:1/db",
        f"postgres:/lab:{SECRET}@127.0.0.1:1/db",
        f'"postgresql://lab:{SECRET}@127.0.0.1:1/db"',
        f" postgresql://lab:{SECRET}@127.0.0.1:1/db",
        f"postgresql//lab:{SECRET}@127.0.0.1:1/db",
        f"postgresql://127.0.0.1:{SECRET}/db",
        f"postgresql://127.0.0.1:1/db?passwd={SECRET}",
        f"postgresql://127.0.0.1:1/db?token={SECRET}",
        f"postgresql://127.0.0.1:1/db?password={SECRET}",
        f"mysql://lab:{SECRET}@host/db?token={SECRET}",
        f"https://lab:{SECRET}@host/db?token={SECRET}",
    ],
)
def test_no_message_repeats_a_password(text: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(text)
    assert SECRET not in str(caught.value)


def test_what_a_name_shows_of_a_url_is_what_is_known_to_be_harmless() -> None:
    url = make_store_url(f"postgresql://h/db?host=/run&sslmode=require&password={SECRET}&token={SECRET}&sslpassword=x")
    assert store_name(url) == "postgresql://h/db?host=%2Frun&sslmode=require"


def read_only(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that may not write to a folder; root is stopped by nothing less than a mount."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if os.geteuid() == 0:
        if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
            pytest.skip("root can write everywhere, and may not mount here")
        command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(folder), *command]
    else:
        folder.chmod(0o555)
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("is_open", [False, pytest.param(True, marks=TAKES_LONG)], ids=["closed", "open"])
def test_a_store_in_a_read_only_directory_is_read_and_says_that_it_takes_no_rows(
    tmp_path: Path, make_campaign: Callable[..., Campaign], is_open: bool
) -> None:
    folder = tmp_path / "shelf"
    folder.mkdir()
    flywheel = [sys.executable, "-m", "flywheel"]
    where = ["--store", str(folder / "a.db")]
    search = ["search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--jobs", "1"]
    with open_store(folder / "a.db") as store:
        store.create_campaign(make_campaign("kept"))
        if is_open:
            listed = read_only(folder, [*flywheel, "campaigns", *where])
    if not is_open:
        listed = read_only(folder, [*flywheel, "campaigns", *where])
    assert (listed.returncode, "kept" in listed.stdout) == (0, True), listed.stderr
    refused = read_only(folder, [*flywheel, *search, *where])
    assert (refused.returncode, refused.stderr.splitlines()[-1:]) == (
        5, [f"flywheel: store {folder / 'a.db'}: is read-only"],
    )  # fmt: skip
    absent = read_only(folder, [*flywheel, *search, "--store", str(folder / "b.db")])
    assert absent.returncode == 5
    assert f"cannot be created: directory {folder} is read-only" in absent.stderr


def test_a_store_that_cannot_be_made_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        (tmp_path / "a.db").touch()
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sql, "ensure_schema", fail)
    with pytest.raises(sqlite3.OperationalError):
        open_store(tmp_path / "a.db")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.db").touch()
    with pytest.raises(sqlite3.OperationalError):
        open_store(tmp_path / "old.db")
    assert (tmp_path / "old.db").exists()


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    """A limit on files stands in for a disk that has room for a name and none for a page."""
    open_one = "import sys; from flywheel.store.sql import open_store; open_store(sys.argv[1])"
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh", sys.executable, "-c", open_one, str(tmp_path / "a.db")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert "StoreError" in done.stderr and "cannot be read or written" in done.stderr
    assert list(tmp_path.iterdir()) == []
