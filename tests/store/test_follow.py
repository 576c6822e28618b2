from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import MirrorError
from flywheel.measure.record import TrialRecord
from flywheel.store import follow as following
from flywheel.store.campaign import Campaign
from flywheel.store.follow import Follower, follow
from flywheel.store.mirror import Views
from flywheel.store.sql import Store, open_store

Records = Callable[..., TrialRecord]
VIEWS = Views(lambda rows: [None for _ in rows], lambda *_: {}, lambda *_: (None, {}))


class Recorder:
    """A mirror that notes what it is asked for, and fails while `down` says so."""

    uri = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.synced: list[tuple[str, int, bool, bool]] = []
        self.down: str | None = None

    def sync(
        self, campaign: Campaign, records: Sequence[TrialRecord], _: str, __: Views, *, live: bool, files: bool
    ) -> int:
        if self.down is not None:
            raise MirrorError(self.down)
        self.synced.append((campaign.name, len(records), live, files))
        return 1


@pytest.fixture
def store(tmp_path: Path, make_campaign: Callable[..., Campaign], make_record: Records) -> Iterator[Store]:
    with open_store(tmp_path / "trials.db") as opened:
        for name in ("first", "second"):
            opened.create_campaign(make_campaign(name))
            opened.append(make_record(campaign=name))
        yield opened


@pytest.fixture
def mirror() -> Recorder:
    return Recorder()


def make_follower(store: Store, mirror: Any, *names: str) -> Follower:
    return Follower(store.name, mirror, names, "kept", VIEWS)


def test_only_campaigns_with_new_rows_are_looked_at_again(store: Store, mirror: Recorder, make_record: Records) -> None:
    follower = make_follower(store, mirror)
    follower.look(last=False)
    follower.look(last=False)
    assert mirror.synced == [("first", 1, False, True), ("second", 1, False, True)]
    store.append(make_record(campaign="second", trial=1))
    follower.look(last=False)
    assert mirror.synced[2:] == [("second", 2, True, False)]
    follower.look(last=True)
    assert mirror.synced[3:] == [("first", 1, False, True), ("second", 2, False, True)]


def test_a_final_is_noticed_though_no_trial_is_new(store: Store, mirror: Recorder, make_record: Records) -> None:
    follower = make_follower(store, mirror, "first")
    follower.look(last=False)
    store.append(make_record("measured", trial=1, source="final"))
    follower.look(last=False)
    follower.look(last=False)
    assert mirror.synced == [("first", 1, False, True), ("first", 2, True, False)]


def test_files_catch_up_after_the_last_row_too(
    store: Store, mirror: Recorder, make_record: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = make_follower(store, mirror, "first")
    follower.look(last=False)
    store.append(make_record(trial=1))
    follower.look(last=False)
    monkeypatch.setattr(following, "FILES_S", 0.0)
    follower.look(last=False)
    follower.look(last=False)
    assert [files for _, _, _, files in mirror.synced] == [True, False, True]


def test_what_a_process_is_searching_is_running_until_the_last_look(store: Store, mirror: Recorder) -> None:
    follower = make_follower(store, mirror, "first")
    follower.running = True
    follower.look(last=False)
    follower.look(last=True)
    assert [live for _, _, live, _ in mirror.synced] == [True, False]


def test_names_narrow_the_campaigns(store: Store, mirror: Recorder) -> None:
    make_follower(store, mirror, "second").look(last=True)
    assert mirror.synced == [("second", 1, False, True)]


def test_trouble_is_told_once_and_made_up_for(
    store: Store, mirror: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FOLLOW_S", 0.0)
    told: list[str] = []
    mirror.down = "MLflow is down"
    looks = 0

    def ended() -> bool:
        nonlocal looks
        looks += 1
        if looks == 10:
            mirror.down = None
        return looks >= 12

    assert follow(make_follower(store, mirror), ended, told.append)
    assert told == ["MLflow is down"]
    assert {name for name, *_ in mirror.synced} == {"first", "second"}


def test_a_server_that_stays_down_is_given_up_after_the_grace(
    store: Store, mirror: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FOLLOW_S", 0.0)
    monkeypatch.setattr(following, "GRACE_S", 0.05)
    mirror.down = "MLflow is down"
    told: list[str] = []
    assert not follow(make_follower(store, mirror), lambda: True, told.append)
    assert told == ["MLflow is down"]


def test_a_last_look_that_fails_slowly_is_tried_again(
    store: Store, mirror: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FOLLOW_S", 0.0)
    now = 0.0
    monkeypatch.setattr(following.time, "monotonic", lambda: now)
    mirror.down = "the tables are being made"

    def tell(_: str) -> None:
        nonlocal now
        now += 10 * following.GRACE_S
        mirror.down = None

    assert follow(make_follower(store, mirror), lambda: True, tell)
    assert {name for name, *_ in mirror.synced} == {"first", "second"}


def test_a_store_that_vanishes_is_waited_for(store: Store, mirror: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FOLLOW_S", 0.0)
    path = Path(store.name)
    hidden = path.with_name("hidden.db")
    store.close()
    path.rename(hidden)
    told: list[str] = []

    def ended() -> bool:
        if told and hidden.exists():
            hidden.rename(path)
        return not hidden.exists()

    assert follow(make_follower(store, mirror), ended, told.append)
    assert [line.endswith("does not exist") for line in told] == [True]
    assert len(mirror.synced) == 2
