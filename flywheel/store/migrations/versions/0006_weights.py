"""Say how a campaign's and a trial's matrices are stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column; in the rows that are there, nothing is quantised."""
    for name in ("campaigns", "trials"):
        op.add_column(name, sa.Column("weights", sa.Text()))
        held = sa.table(name, sa.column("weights"), sa.column("dtype"))
        op.get_bind().execute(held.update().values(weights=held.c.dtype))
