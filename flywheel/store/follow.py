"""Keeping a mirror in step with a store that grows, from a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from flywheel.errors import FlywheelError, MirrorError, StoreError
from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import Campaign
from flywheel.store.mirror import Views
from flywheel.store.mlflow import Mirror
from flywheel.store.sql import open_store
from flywheel.store.tracking import check_tracking

FOLLOW_S: Final = 2.0
"""Time between two looks at the store; after trouble it doubles, up to MOST_S."""
MOST_S: Final = 30.0
FILES_S: Final = 60.0
"""Least time between two writes of a growing campaign's artifacts, which cost a lowering."""
GRACE_S: Final = 5.0
"""How long a last look that failed is tried again before the rest is left to the next sync."""

_TICK_S: Final = 0.1


@dataclass(slots=True)
class Follower:
    """One mirror of one store: `look` brings the mirror up to date, and remembers the rows that it has seen.

    `names` are the campaigns to mirror; empty means all. A campaign is marked as running from the second look on that
    finds new rows; with `running`, from the first.
    """

    url: str
    mirror: Mirror
    names: Collection[str]
    children: str
    views: Views
    running: bool = False
    found: Callable[[str], None] | None = None
    """Called once if `names` has one campaign, with the path of its page behind the server's address."""
    _seen: dict[str, int] = field(default_factory=dict)
    _files: dict[str, tuple[int, float]] = field(default_factory=dict)

    def look(self, last: bool) -> int:
        """Bring every campaign with new rows, or with outdated files, up to date. The `last` look marks campaigns as
        finished. Returns the number of things that were missing.

        Raises StoreError and MirrorError.
        """
        check_tracking(self.mirror.uri, self.url)
        with open_store(self.url, create=False) as store:
            summaries = [each for each in store.campaigns() if not self.names or each.campaign.name in self.names]
            written = 0
            for each in summaries:
                name, files = each.campaign.name, last or self._files_are_due(each.campaign.name, each.rows)
                if files or self._seen.get(name) != each.rows:
                    written += self._sync(each.campaign, store.trials(name), last, files)
        return written

    def _files_are_due(self, name: str, rows: int) -> bool:
        if name not in self._files:
            return True
        known, when = self._files[name]
        return known != rows and time.monotonic() - when >= FILES_S

    def _sync(self, campaign: Campaign, records: Sequence[TrialRecord], last: bool, files: bool) -> int:
        name, now = campaign.name, time.monotonic()
        live = not last and (self.running or name in self._seen)
        if self.found is not None and len(self.names) == 1:
            self.found(self.mirror.page(campaign, goes_on=live))
            self.found = None
        written = self.mirror.sync(campaign, records, self.children, self.views, live=live, files=files)
        self._seen[name] = len(records)
        if files:
            self._files[name] = len(records), now
        return written


def follow(follower: Follower, ended: Callable[[], bool], tell: Callable[[str], None]) -> bool:
    """Look again and again until `ended`, then a last time. Returns whether the last look succeeded.

    `tell` gets each trouble with the store or the server, but not the same trouble twice in a row. The next look makes
    up for a failed one, so nothing is lost.
    """
    told, pause = "", FOLLOW_S
    while not ended():
        told = _try(follower, False, told, tell)
        pause = min(MOST_S, 2 * pause) if told else FOLLOW_S
        until = time.monotonic() + pause
        while time.monotonic() < until and not ended():
            time.sleep(_TICK_S)
    told = _try(follower, True, told, tell)
    deadline = time.monotonic() + GRACE_S
    while told and time.monotonic() < deadline:
        time.sleep(FOLLOW_S)
        told = _try(follower, True, told, tell)
    return not told


def _try(follower: Follower, last: bool, told: str, tell: Callable[[str], None]) -> str:
    """Look once. Returns its trouble, empty if there was none; `tell` gets it unless `told` is the same."""
    try:
        follower.look(last)
    except (MirrorError, StoreError) as error:
        trouble = _fact(error)
        if trouble != told:
            tell(trouble)
        return trouble
    return ""


def _fact(error: FlywheelError) -> str:
    return " ".join(str(error).split())
