"""Say what a trial was measured against, and whether other processes computed on its GPU."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns, absent in the rows that are there."""
    op.add_column("trials", sa.Column("strangers", sa.BigInteger()))
    for name in ("rival_us", "gain_low_us", "gain_high_us"):
        op.add_column("trials", sa.Column(name, sa.Double()))
