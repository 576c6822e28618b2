"""What the runs of one campaign try at the moment, so that each config is one run's and each number one row's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from sqlalchemy import Connection, Engine, delete, func, insert, select

from flywheel.measure.record import TrialRecord
from flywheel.store.engine import writing
from flywheel.store.presence import Presence
from flywheel.store.schema import campaigns, claims, record_values, trials


class Claim(Enum):
    """What becomes of a wish to try a config."""

    GRANTED = auto()
    """No other run may try it until this run has appended its row, or is over."""
    TAKEN = auto()
    """A run is trying it."""
    FULL = auto()
    """The runs are trying as many as are wanted."""
    STALE = auto()
    """There are rows that the asking run has not seen."""


class Claims:
    """One run's share of a campaign. Every method raises StoreError on database trouble."""

    def __init__(self, engine: Engine, name: str, campaign: str, presence: Presence) -> None:
        self._engine, self._name, self._campaign = engine, name, campaign
        self._presence: Final = presence

    def claim(self, config_id: str, next_trial: int, room: int) -> Claim:
        """Ask for a config. `next_trial` is the number behind the rows that this run has seen; `room` is how many
        configs all runs together may be trying."""
        self._presence.renew()
        with self._alone() as connection:
            if _next_trial(connection, self._campaign) != next_trial:
                return Claim.STALE
            held = self._held(connection)
            if config_id in held:
                return Claim.TAKEN
            if len(held) >= room:
                return Claim.FULL
            connection.execute(
                insert(claims), {"campaign": self._campaign, "config_id": config_id, "run": self._presence.run}
            )
            return Claim.GRANTED

    def held(self) -> set[str]:
        """The configs that a run is trying."""
        with self._alone() as connection:
            return self._held(connection)

    def append(self, record: TrialRecord) -> TrialRecord:
        """Append the row of a config under the campaign's next number, and give up its claim; the row, with that
        number."""
        with self._alone() as connection:
            record = replace(record, trial=_next_trial(connection, self._campaign))
            connection.execute(insert(trials), record_values(record))
            mine = claims.c.campaign == self._campaign, claims.c.config_id == record.config_id
            connection.execute(delete(claims).where(*mine, claims.c.run == self._presence.run))
        return record

    @contextmanager
    def _alone(self) -> Iterator[Connection]:
        """A transaction that no other run of the campaign is in. SQLite has one writer anyway."""
        with writing(self._engine, self._name) as connection:
            if connection.dialect.name == "postgresql":
                row = select(campaigns.c.name).where(campaigns.c.name == self._campaign)
                connection.execute(row.with_for_update(key_share=True))
            yield connection

    def _held(self, connection: Connection) -> set[str]:
        """What live runs hold; the claims of dead ones are removed."""
        mine = claims.c.campaign == self._campaign
        found = connection.execute(select(claims.c.config_id, claims.c.run).where(mine)).all()
        if any(run != self._presence.run for _, run in found):
            alive = self._presence.alive()
            dead = sorted({run for _, run in found} - alive)
            if dead:
                connection.execute(delete(claims).where(mine, claims.c.run.in_(dead)))
            found = [each for each in found if each.run in alive]
        return {config_id for config_id, _ in found}


def _next_trial(connection: Connection, campaign: str) -> int:
    """The number behind the last row."""
    query = select(func.max(trials.c.trial)).where(trials.c.campaign == campaign)
    last: int | None = connection.execute(query).scalar()
    return 0 if last is None else last + 1
