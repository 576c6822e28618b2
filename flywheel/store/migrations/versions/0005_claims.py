"""Say what the runs of a campaign are trying."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the table, empty."""
    op.create_table(
        "claims",
        sa.Column("campaign", sa.Text(), nullable=False),
        sa.Column("config_id", sa.Text(), nullable=False),
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("campaign", "config_id"),
        sa.ForeignKeyConstraint(["campaign"], ["campaigns.name"], name="fk_claims_campaign"),
    )
