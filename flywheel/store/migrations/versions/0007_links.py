"""Keep what was measured of the links between a machine's GPUs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the table, empty."""
    op.create_table(
        "links",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("gpu_driver", sa.Text()),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("peer", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("one_way_us", "same_gpu_us", "to_gbs", "from_gbs")),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_links_gpu", "links", ["gpu"])
