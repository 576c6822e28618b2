"""The configs that runs of one campaign are trying now: no two runs try one config, and no two rows get one number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Final

from sqlalchemy import Connection, Engine, bindparam, delete, func, insert, select

from flywheel.errors import StoreError
from flywheel.measure.record import TrialRecord
from flywheel.store.engine import writing
from flywheel.store.presence import Presence, enter
from flywheel.store.schema import campaigns, claims, record_values, trials

_LAST: Final = select(func.max(trials.c.trial)).where(trials.c.campaign == bindparam("campaign"))
_HELD: Final = select(claims.c.config_id, claims.c.run).where(claims.c.campaign == bindparam("campaign"))
_MINE: Final = delete(claims).where(
    claims.c.campaign == bindparam("campaign"),
    claims.c.config_id == bindparam("config_id"),
    claims.c.run == bindparam("run"),
)
_ROW: Final = insert(trials)
_CLAIM: Final = insert(claims)
"""Statements of every trial: to build one takes longer than to execute it."""


class Claim(Enum):
    """The answer to a run that asks for a config."""

    GRANTED = auto()
    """The run may try it. No other run may, until this run has appended the row or is over."""
    TAKEN = auto()
    """Another run is trying it."""
    FULL = auto()
    """The configs that other runs are trying are already as many as the campaign still wants."""
    STALE = auto()
    """The store has rows that the asking run has not seen."""


class Claims:
    """One run's share of a campaign. Every method raises StoreError on database trouble."""

    def __init__(self, engine: Engine, name: str, campaign: str, presence: Presence) -> None:
        self._engine, self._name, self._campaign = engine, name, campaign
        self._presence: Final = presence

    def claim(self, config_id: str, next_trial: int, room: int) -> Claim:
        """Ask for a config. A config that this run is trying already is granted again.

        `next_trial` is one more than the number of the last row that this run has seen. `room` is the number of further
        rows that the campaign wants, beyond the rows that this run has seen and the configs that it is trying.
        """
        self._presence.renew()
        with self._alone() as connection:
            if _next_trial(connection, self._campaign) != next_trial:
                return Claim.STALE
            held = self._held(connection)
            run = held.get(config_id)
            others = sum(run != self._presence.run for run in held.values())
            if run not in (None, self._presence.run):
                return Claim.TAKEN
            if others >= room:
                return Claim.FULL
            if run is None:
                connection.execute(_CLAIM, self._mine(config_id))
            return Claim.GRANTED

    def held(self) -> set[str]:
        """The ids of the configs that all runs, this one included, are trying."""
        self._presence.renew()
        with self._alone() as connection:
            return set(self._held(connection))

    def append(self, record: TrialRecord) -> TrialRecord:
        """Append a row under the campaign's next number, and give up the claim of its config. Returns the row with that
        number."""
        with self._alone() as connection:
            number = _next_trial(connection, self._campaign)
            record = record if record.trial == number else replace(record, trial=number)
            connection.execute(_ROW, record_values(record))
            connection.execute(_MINE, self._mine(record.config_id))
        return record

    def _mine(self, config_id: str) -> dict[str, Any]:
        """This run's claim of a config, as a statement's parameters."""
        return {"campaign": self._campaign, "config_id": config_id, "run": self._presence.run}

    @contextmanager
    def _alone(self) -> Iterator[Connection]:
        """A transaction that no other run of the campaign is in."""
        with writing(self._engine, self._name) as connection:
            keep_to_oneself(connection, self._campaign)
            yield connection

    def _held(self, connection: Connection) -> dict[str, int]:
        """The live run that holds each config. Removes the claims of dead runs."""
        mine = claims.c.campaign == self._campaign
        found = connection.execute(_HELD, {"campaign": self._campaign}).all()
        if any(run != self._presence.run for _, run in found):
            alive = self._presence.alive()
            dead = sorted({run for _, run in found} - alive)
            if dead:
                connection.execute(delete(claims).where(mine, claims.c.run.in_(dead)))
            found = [each for each in found if each.run in alive]
        return {config_id: run for config_id, run in found}  # noqa: C416  rows are no pairs to a type checker


def keep_to_oneself(connection: Connection, campaign: str) -> None:
    """Let no other transaction number rows of the campaign until this one ends. SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        row = select(campaigns.c.name).where(campaigns.c.name == campaign)
        connection.execute(row.with_for_update(key_share=True))


def delete_campaign(engine: Engine, name: str, campaign: str) -> None:
    """Delete a campaign of the store `name` and all of its rows. Raises StoreError where a run is trying one of its
    configs now."""
    presence = enter(engine, name)
    try:
        with writing(engine, name) as connection:
            keep_to_oneself(connection, campaign)
            held = set(connection.execute(select(claims.c.run).where(claims.c.campaign == campaign)).scalars())
            if held & presence.alive():
                raise StoreError(f"store {name}: campaign {campaign!r} is being searched; end that first")
            for table, column in ((claims, "campaign"), (trials, "campaign"), (campaigns, "name")):
                connection.execute(delete(table).where(table.c[column] == campaign))
    finally:
        presence.end()


def _next_trial(connection: Connection, campaign: str) -> int:
    """One more than the number of the last row."""
    last: int | None = connection.execute(_LAST, {"campaign": campaign}).scalar()
    return 0 if last is None else last + 1
