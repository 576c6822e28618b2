"""Tables of the trial store. A change here needs a migration in migrations/versions and a new SCHEMA_VERSION."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeEngine

from flywheel.measure.record import COLUMNS, TrialRecord

SCHEMA_VERSION: Final = "0007"
"""Revision of the newest migration."""

VERSION_TABLE: Final = "schema_version"
"""Table that holds a store's revision; the migrations own it."""

_SQL_TYPES: Final[dict[type, type[TypeEngine[Any]]]] = {str: Text, int: BigInteger, float: Double}

_BEFORE: Final = {"batch": "1"}
"""Defaults, as SQL, of columns that may not be empty and that a migration added: rows from before get them. Rows that
this code adds always have a value of their own."""

metadata: Final = MetaData()

campaigns: Final = Table(
    "campaigns",
    metadata,
    Column("name", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("gpu", Text, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("context", BigInteger, nullable=False),
    Column("batch", BigInteger, nullable=False, server_default=text(_BEFORE["batch"])),
    Column("measure", Text, nullable=False),
    Column("sampler", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("spec", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("weights", Text),
)

trials: Final = Table(
    "trials",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    *(
        Column(
            column.name,
            _SQL_TYPES[column.python_type],
            *([ForeignKey("campaigns.name", name="fk_trials_campaign")] if column.name == "campaign" else []),
            nullable=column.nullable,
            server_default=text(_BEFORE[column.name]) if column.name in _BEFORE else None,
        )
        for column in COLUMNS
    ),
    UniqueConstraint("campaign", "trial", name="uq_trials_campaign_trial"),
    Index("ix_trials_program_id", "program_id"),
    Index("ix_trials_config_id", "config_id"),
    Index("ix_trials_model_gpu", "model", "gpu"),
)

claims: Final = Table(
    "claims",
    metadata,
    Column("campaign", Text, ForeignKey("campaigns.name", name="fk_claims_campaign"), primary_key=True),
    Column("config_id", Text, primary_key=True),
    Column("run", BigInteger, nullable=False),
)
"""The configs that runs are trying now. This table loses rows when a trial's row is appended, and when a run has ended;
the others only when a user deletes a campaign."""

ceilings: Final = Table(
    "ceilings",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("gpu", Text, nullable=False),
    Column("gpu_driver", Text),
    Column("host", Text, nullable=False),
    Column("read_gbs", Double, nullable=False),
    Column("read_kernel", Text, nullable=False),
    Column("hand_off_us", Double, nullable=False),
    Column("created_at", Text, nullable=False),
    Index("ix_ceilings_gpu", "gpu"),
)
"""The measurements of `flywheel doctor --probe`, append-only; the newest row of a GPU counts."""

links: Final = Table(
    "links",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("gpu", Text, nullable=False),
    Column("gpu_driver", Text),
    Column("host", Text, nullable=False),
    Column("peer", BigInteger, nullable=False),
    Column("one_way_us", Double, nullable=False),
    Column("same_gpu_us", Double, nullable=False),
    Column("to_gbs", Double, nullable=False),
    Column("from_gbs", Double, nullable=False),
    Column("created_at", Text, nullable=False),
    Index("ix_links_gpu", "gpu"),
)
"""What the same command measures between GPU 0 and each `peer`, append-only. The rows of the newest run that found
links count."""


def record_values(record: TrialRecord) -> dict[str, Any]:
    """A trial's row as a statement's parameters."""
    return {column.name: getattr(record, column.name) for column in COLUMNS}
