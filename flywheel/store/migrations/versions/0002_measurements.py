"""Say on which GPU, driver and kernels a trial was measured, and keep what was measured of the GPU itself."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns, absent in the rows that are there, and the table of ceilings."""
    for name in ("l2_state", "throttle", "gpu_name", "nvrtc", "kernels"):
        op.add_column("trials", sa.Column(name, sa.Text()))
    for name in ("samples", "sm_clock_mhz", "mem_clock_mhz", "temperature_c"):
        op.add_column("trials", sa.Column(name, sa.BigInteger()))
    for name in ("batch_us", "power_w"):
        op.add_column("trials", sa.Column(name, sa.Double()))
    op.create_table(
        "ceilings",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("gpu_driver", sa.Text()),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("read_gbs", sa.Double(), nullable=False),
        sa.Column("read_kernel", sa.Text(), nullable=False),
        sa.Column("hand_off_us", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_ceilings_gpu", "ceilings", ["gpu"])
