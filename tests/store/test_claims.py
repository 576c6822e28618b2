"""Runs that share a campaign: no config is two runs', no number is two rows', and no claim outlives its run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from postgres_server import Server

from flywheel.errors import StoreError
from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import Campaign
from flywheel.store.claims import Claim
from flywheel.store.sql import Store, open_store

Records = Callable[..., TrialRecord]
ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from flywheel.store.sql import open_store
with open_store(sys.argv[1]) as store, store.share("first") as claims:
    print(claims.claim("abc", 0, 9).name, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def store(store_url: str, make_campaign: Callable[..., Campaign]) -> Iterator[Store]:
    with open_store(store_url) as opened:
        opened.create_campaign(make_campaign())
        yield opened


def test_a_config_is_one_runs_until_its_row_is_there(store: Store, make_record: Records) -> None:
    with store.share("first") as one, store.share("first") as other:
        record = make_record(trial=7)
        assert one.claim(record.config_id, 0, 9) is Claim.GRANTED
        assert other.claim(record.config_id, 0, 9) is Claim.TAKEN
        assert one.claim(record.config_id, 0, 9) is Claim.GRANTED
        assert one.append(record).trial == 0
        assert other.claim(record.config_id, 1, 9) is Claim.GRANTED


def test_a_run_that_has_not_seen_every_row_is_told_so(store: Store, make_record: Records) -> None:
    with store.share("first") as one, store.share("first") as other:
        one.append(make_record())
        assert other.claim("abc", 0, 9) is Claim.STALE
        assert store.trials("first", 1) == []
        assert other.claim("abc", 1, 9) is Claim.GRANTED


def test_all_runs_together_try_no_more_than_is_wanted(store: Store) -> None:
    with store.share("first") as one, store.share("first") as other:
        assert [one.claim("a", 0, 2), other.claim("b", 0, 2)] == [Claim.GRANTED] * 2
        assert [one.claim("c", 0, 1), other.claim("c", 0, 1)] == [Claim.FULL] * 2  # as each has one itself


def test_rows_of_two_runs_are_numbered_without_a_gap(store: Store, make_record: Records) -> None:
    with store.share("first") as one, store.share("first") as other:
        numbers = [run.append(make_record(trial=99)).trial for run in (one, other, other, one)]
    assert numbers == [record.trial for record in store.trials("first")] == [0, 1, 2, 3]


def test_a_campaign_is_deleted_with_its_rows_alone_and_only_once_nobody_searches_it(
    store: Store, make_record: Records, make_campaign: Callable[..., Campaign]
) -> None:
    store.create_campaign(make_campaign("other"))
    store.append_all([make_record(), make_record(trial=1), make_record(campaign="other")])
    with store.share("first") as run:
        run.claim("abc", 2, 9)
        with pytest.raises(StoreError, match="campaign 'first' is being searched; end that first"):
            store.delete_campaign("first")
        assert len(store.trials("first")) == 2
    store.delete_campaign("first")
    assert (store.campaign("first"), store.trials("first")) == (None, [])
    assert [record.campaign for record in store.trials("other")] == ["other"]


def test_what_a_run_leaves_behind_is_free(store: Store) -> None:
    with store.share("first") as one:
        one.claim("abc", 0, 9)
    with store.share("first") as other:
        assert other.held() == set()
        assert other.claim("abc", 0, 9) is Claim.GRANTED


def test_what_a_killed_run_was_trying_is_free_at_once(store_url: str, store: Store) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, store_url], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as holder, store.share("first") as other:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == "GRANTED\n"
        assert other.claim("abc", 0, 9) is Claim.TAKEN
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        for _ in range(100):  # the server has to read the end of the connection
            if (answer := other.claim("abc", 0, 9)) is Claim.GRANTED:
                break
        assert answer is Claim.GRANTED


def test_runs_leave_no_file_beside_the_store(tmp_path: Path, make_campaign: Callable[..., Campaign]) -> None:
    (tmp_path / "a.db-run-17").touch()  # of a run that was killed
    with open_store(tmp_path / "a.db") as store:
        store.create_campaign(make_campaign())
        with store.share("first") as claims:
            claims.claim("abc", 0, 9)
            assert len(list(tmp_path.glob("a.db-run-*"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.db"]


def test_a_run_that_outlives_a_restart_of_its_server_keeps_its_claims(
    postgres_server: Server, make_campaign: Callable[..., Campaign]
) -> None:
    url = postgres_server.create_database()
    with open_store(url) as store:
        store.create_campaign(make_campaign())
        with store.share("first") as one, store.share("first") as other:
            one.claim("abc", 0, 9)
            postgres_server.stop()
            postgres_server.start()
            assert one.claim("def", 0, 9) is Claim.GRANTED
            assert other.claim("abc", 0, 9) is Claim.TAKEN
    postgres_server.drop_database(url)


def test_a_run_whose_file_cannot_be_read_may_be_alive(
    tmp_path: Path, make_campaign: Callable[..., Campaign], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.open

    def refuse(path: Any, *flags: int, **more: Any) -> int:
        if str(path).endswith("-run-17"):
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path, *flags, **more)

    (tmp_path / "a.db-run-17").touch()
    with open_store(tmp_path / "a.db") as store:
        store.create_campaign(make_campaign())
        monkeypatch.setattr(os, "open", refuse)
        with store.share("first") as claims:
            assert claims.claim("abc", 0, 9) is Claim.GRANTED
    assert (tmp_path / "a.db-run-17").exists()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_plain_file_is_no_run_and_stays(
    make: Callable[[Path], None], tmp_path: Path, make_campaign: Callable[..., Campaign]
) -> None:
    make(tmp_path / "a.db-run-17")
    with open_store(tmp_path / "a.db") as store:
        store.create_campaign(make_campaign())
        with store.share("first") as claims:
            assert claims.claim("abc", 0, 9) is Claim.GRANTED
    assert [path.name for path in tmp_path.glob("a.db-run-*")] == ["a.db-run-17"]


def test_rows_that_come_together_take_no_number_of_a_row_under_way(
    postgres_server: Server, make_campaign: Callable[..., Campaign], make_record: Records
) -> None:
    url = postgres_server.create_database()
    with open_store(url) as store, ThreadPoolExecutor(1) as pool:
        store.create_campaign(make_campaign())
        with store.share("first") as claims:
            claims.claim("abc", 0, 9)
            with claims._alone():
                others = pool.submit(store.append_all, [make_record(trial=5)])
                with pytest.raises(TimeoutError):
                    others.result(0.5)
            others.result(30)
    postgres_server.drop_database(url)
