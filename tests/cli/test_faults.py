"""What a search does when its store fails under it: one line, exit code 5, and nothing half-written."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from click.testing import Result
from effort import LONG
from postgres_server import Server

from flywheel.cli.warming import COMPILING
from flywheel.measure.record import TrialRecord
from flywheel.store import engine, postgres
from flywheel.store.claims import Claims
from flywheel.store.sql import open_store

Run = Callable[..., Result]
SEARCH = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--context", "16", "--name", "c")
TRIALS_BEFORE = 3
DISK_KIB = 320
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
SMALL_DISK = f'mount -t tmpfs -o size={DISK_KIB}k tmpfs "$1"'
SMALL_FILES = f"ulimit -f {2 * DISK_KIB}"
FILL = f"""
"$3" -m flywheel {" ".join(SEARCH)} --jobs 1 --trials 200 --store "$1/trials.db"
code=$?
cp -r "$1/." "$2"
exit $code
"""


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Let something happen right after a store's first TRIALS_BEFORE rows."""

    def after(fault: Callable[[], object]) -> None:
        append = Claims.append

        def append_and_strike(claims: Claims, record: TrialRecord) -> TrialRecord:
            record = append(claims, record)
            if record.trial + 1 == TRIALS_BEFORE:
                fault()
            return record

        monkeypatch.setattr(Claims, "append", append_and_strike)

    return after


def check_stopped(exit_code: int | None, stdout: str, stderr: str, fact: str) -> None:
    """Exit code 5, nothing on stdout, and one line of trouble at the end of stderr."""
    assert (exit_code, stdout) == (5, ""), stderr
    lines = stderr.splitlines()
    progress = ("trials ", "Latencies ", "Known: ", "smollm2", COMPILING)  # the last in a checkout's first search
    assert [line for line in lines if not line.startswith(progress)] == lines[-1:]
    assert lines[-1].startswith("flywheel: store ")
    assert fact in lines[-1]


def check_search_stops(run: Run, store: str, fact: str, jobs: int = 1) -> None:
    """Assert that a search into a store that fails stops with code 5, and says `fact` in one line."""
    result = run(*SEARCH, "--jobs", jobs, "--trials", "9", "--store", store)
    check_stopped(result.exit_code, result.stdout, result.stderr, fact)


def check_resumes(run: Run, store: str, trials: int) -> None:
    """The rows before the fault are there, and the same command goes on behind them."""
    with open_store(store, create=False) as opened:
        before = opened.trials("c")
    assert [record.trial for record in before] == list(range(trials))
    result = run(*SEARCH, "--jobs", "1", "--trials", str(trials + 1), "--store", store)
    assert result.exit_code == 0, result.stderr
    with open_store(store, create=False) as opened:
        after = opened.trials("c")
    assert (after[:trials], len(after)) == (before, trials + 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_server_that_stops_under_a_search_is_code_5(
    run: Run, strike: Callable[..., None], postgres_server: Server, jobs: int
) -> None:
    store = postgres_server.create_database()
    strike(postgres_server.stop)
    try:
        check_search_stops(run, store, "connection", jobs)
    finally:
        postgres_server.start()
    check_resumes(run, store, TRIALS_BEFORE)


def test_a_database_that_is_dropped_under_a_search_is_code_5(
    run: Run, strike: Callable[..., None], postgres_server: Server
) -> None:
    store = postgres_server.create_database()
    strike(lambda: postgres_server.drop_database(store))
    check_search_stops(run, store, "does not exist")


def test_a_file_that_is_removed_under_a_search_is_code_5(run: Run, strike: Callable[..., None]) -> None:
    strike(Path("trials.db").unlink)
    check_search_stops(run, "trials.db", "removed or replaced")
    assert not Path("trials.db").exists()


@contextmanager
def file_lock(url: str) -> Iterator[None]:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield


@contextmanager
def table_lock(url: str) -> Iterator[None]:
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE trials")
        yield
        holder.rollback()


def test_a_store_that_is_locked_under_a_search_is_code_5(
    run: Run, strike: Callable[..., None], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 1)
    lock: AbstractContextManager[None] = (file_lock if store_url.startswith("sqlite") else table_lock)(store_url)
    with ExitStack() as held:
        strike(lambda: held.enter_context(lock))
        check_search_stops(run, store_url, "is locked by another")
    check_resumes(run, store_url, TRIALS_BEFORE)


def test_a_disk_that_fills_up_under_a_search_is_code_5(run: Run, tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    copy.mkdir()
    mounting = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", disk]
    if subprocess.run(mounting, capture_output=True, check=False).returncode == 0:
        wrapper, limit, fact = OWN_MOUNTS, SMALL_DISK, "cannot grow: the disk is full"
    else:  # a container that may not mount: a limit on files stands in for the disk
        wrapper, limit, fact = (), SMALL_FILES, "cannot be read or written"
    command = [*wrapper, "sh", "-c", f"{limit} && {FILL.strip()}", "sh", disk, copy, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    check_stopped(done.returncode, done.stdout, done.stderr, fact)
    with closing(sqlite3.connect(copy / "trials.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (trials,) = connection.execute("SELECT count(*) FROM trials").fetchone()
    assert 0 < trials < 200
    check_resumes(run, str(copy / "trials.db"), trials)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=LONG)])
def test_a_server_that_freezes_under_a_search_is_code_5(
    run: Run, strike: Callable[..., None], postgres_server: Server, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 2)
    monkeypatch.setattr(engine, "ANSWER_S", 3.0)
    monkeypatch.setattr(postgres, "PING_S", 1.0)
    store = postgres_server.create_database()
    strike(postgres_server.freeze)
    try:
        check_search_stops(run, store, "does not answer", jobs)
    finally:
        postgres_server.thaw()
    check_resumes(run, store, TRIALS_BEFORE)
