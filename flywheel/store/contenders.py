"""Which rows may be a campaign's best, in SQL: what `measure.standing` decides in Python."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, FromClause, and_, case, func, or_, select

from flywheel.measure.tenants import SPREAD
from flywheel.store.schema import trials


def contenders(conditions: Sequence[ColumnElement[bool]]) -> tuple[FromClause, ColumnElement[bool]]:
    """Where to select trials from, and of a row there: it may be the best, as `measure.standing` says.

    `conditions` narrow the rows that are looked at, by whole campaigns. What a row is compared with is joined, each
    computed once: a look-up per row takes seconds with ten thousand of them.
    """
    newest = (
        select(trials.c.campaign, func.max(trials.c.trial).label("trial"))
        .where(trials.c.source == "final", *conditions)
        .group_by(trials.c.campaign)
        .subquery()
    )
    final = trials.alias("final")
    last = (
        select(final.c.campaign, final.c.trial, final.c.created_at)
        .join(newest, and_(newest.c.campaign == final.c.campaign, newest.c.trial == final.c.trial))
        .subquery()
    )
    first = (
        select(trials.c.campaign, trials.c.program_id, func.min(trials.c.trial).label("trial"))
        .where(*conditions)
        .group_by(trials.c.campaign, trials.c.program_id)
        .subquery()
    )
    source = trials.outerjoin(last, last.c.campaign == trials.c.campaign).outerjoin(
        first, and_(first.c.campaign == trials.c.campaign, first.c.program_id == trials.c.program_id)
    )
    is_final = trials.c.source == "final"
    certain = or_(trials.c.gain_low_us.is_(None), trials.c.gain_low_us > 0.0, is_final)
    holds = or_(
        last.c.trial.is_(None),
        trials.c.trial > last.c.trial,
        and_(is_final, trials.c.created_at == last.c.created_at),
    )
    new = or_(trials.c.source != "store", first.c.trial == trials.c.trial)
    return source, and_(certain, holds, new)


def imported() -> ColumnElement[int]:
    """Of a row: 1 where it was imported, else 0."""
    return case((trials.c.imported_from.is_(None), 0), else_=1)


def doubtful() -> ColumnElement[int]:
    """Of a row: 1 where it `is_doubtful`, else 0."""
    spread = trials.c.p90_us - trials.c.p10_us > SPREAD * trials.c.latency_us
    return case((and_(trials.c.outcome == "measured", or_(trials.c.strangers > 0, spread)), 1), else_=0)
