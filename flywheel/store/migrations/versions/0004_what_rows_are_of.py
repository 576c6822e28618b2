"""Say of how many sequences a trial is, how its numbers were judged, and whether it was imported; set aside rows whose
numbers contradict each other."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_NAMED: Final = re.compile(r"-c\d+-b([2-8])-")
"""How a search called its campaign where it decoded so many sequences."""

_FAR: Final = 9e-10
"""Relative difference that no rounding explains: a little less than what a row may have."""

_MEASURED: Final = (
    "p10_us", "p90_us", "samples", "l2_state", "batch_us", "sm_clock_mhz", "mem_clock_mhz", "power_w", "temperature_c",
    "throttle", "strangers", "rival_us", "gain_low_us", "gain_high_us",
)  # fmt: skip
_SECONDS: Final = ("ask_s", "lower_s", "validate_s", "measure_s")


def upgrade() -> None:
    """Add the columns and fill those that the rows that are there tell; then the other changes of meaning."""
    for table in ("campaigns", "trials"):
        op.add_column(table, sa.Column("batch", sa.BigInteger(), nullable=False, server_default=sa.text("1")))
    for name in ("verdict_error", "verdict_bound"):
        op.add_column("trials", sa.Column(name, sa.Double()))
    for name in ("verdict_where", "imported_from"):
        op.add_column("trials", sa.Column(name, sa.Text()))
    held = sa.MetaData()
    held.reflect(op.get_bind(), only=("campaigns", "trials"))
    campaigns, trials = held.tables["campaigns"], held.tables["trials"]
    _fill_batches(campaigns, trials)
    _rename_laptop(campaigns, trials)
    _forgive(trials)
    _set_aside(trials)


def _forgive(trials: sa.Table) -> None:
    """Turn rejections for lack of GPU memory into outcome no_memory: they say nothing about the program."""
    lacked = sa.and_(trials.c.outcome == "rejected", trials.c.reason.like("[gpu-memory]%"))
    op.get_bind().execute(trials.update().where(lacked).values(outcome="no_memory"))


def _fill_batches(campaigns: sa.Table, trials: sa.Table) -> None:
    """A campaign's spec says its batch; specs of before there were batches leave it to the name."""
    bind = op.get_bind()
    for name, spec in bind.execute(sa.select(campaigns.c.name, campaigns.c.spec)).all():
        batch = _told(spec).get("batch")
        if not isinstance(batch, int):
            named = _NAMED.search(name)
            batch = 1 if named is None else int(named[1])
        if batch != 1:
            bind.execute(campaigns.update().where(campaigns.c.name == name).values(batch=batch))
            bind.execute(trials.update().where(trials.c.campaign == name).values(batch=batch))


def _told(spec: str) -> dict[str, Any]:
    told = json.loads(spec)
    return told if isinstance(told, dict) else {}


def _rename_laptop(campaigns: sa.Table, trials: sa.Table) -> None:
    """Target `rtx5090` had the numbers of the laptop chip, which is another target than the desktop card."""
    bind = op.get_bind()
    chosen = sa.select(campaigns.c.name, campaigns.c.spec).where(campaigns.c.gpu == "rtx5090")
    for name, spec in bind.execute(chosen).all():
        told = _told(spec)
        if told.get("gpu") == "rtx5090":
            told["gpu"] = "rtx5090-laptop"
        changed = {"gpu": "rtx5090-laptop", "spec": json.dumps(told, sort_keys=True)}
        bind.execute(campaigns.update().where(campaigns.c.name == name).values(**changed))
    bind.execute(trials.update().where(trials.c.gpu == "rtx5090").values(gpu="rtx5090-laptop"))


def _set_aside(trials: sa.Table) -> None:
    """Rows whose numbers cannot all be true become implausible; their reason keeps the numbers."""
    bind, row = op.get_bind(), trials.c
    for name in _SECONDS:
        bind.execute(trials.update().where(row[name] < 0).values({name: None}))
    objective = sa.case((row.outcome == "measured", row.latency_us), (row.outcome == "predicted", row.predicted_us))
    bind.execute(
        trials.update()
        .where(row.floor_fraction.is_not(None), sa.or_(objective.is_(None), row.floor_us.is_(None)))
        .values(floor_fraction=None)
    )
    wrong = sa.or_(
        sa.and_(row.outcome == "measured", _contradicts(trials)),
        objective < row.floor_us * (1.0 - _FAR),
        sa.func.abs(row.floor_fraction * objective - row.floor_us) > _FAR * row.floor_us,
    )
    told = ("outcome", "latency_us", "p10_us", "p90_us", "samples", "predicted_us", "floor_us", "floor_fraction",
            "gain_low_us", "gain_high_us")  # fmt: skip
    for found in bind.execute(sa.select(row.id, *(row[name] for name in told)).where(wrong)).mappings().all():
        said = ", ".join(f"{name} {found[name]}" for name in told if found[name] is not None)
        blank = dict.fromkeys(("latency_us", "floor_fraction", *_MEASURED))
        bind.execute(
            trials.update()
            .where(row.id == found["id"])
            .values(
                outcome="implausible",
                reason=f"these numbers cannot all be true: {said}",
                source=sa.case((row.source == "final", "search"), else_=row.source),
                **blank,
            )
        )


def _contradicts(trials: sa.Table) -> sa.ColumnElement[bool]:
    """Of a measured row."""
    row = trials.c
    return sa.or_(
        row.p10_us.is_(None),
        row.p90_us.is_(None),
        row.samples.is_(None),
        row.samples < 1,
        row.p10_us > row.latency_us,
        row.latency_us > row.p90_us,
        row.gain_low_us > row.gain_high_us,
    )
