"""Create campaigns and trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create both tables and their indexes."""
    op.create_table(
        "campaigns",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("context", sa.BigInteger(), nullable=False),
        sa.Column("measure", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("campaign", sa.Text(), nullable=False),
        sa.Column("trial", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("context", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("config_id", sa.Text(), nullable=False),
        sa.Column("program_id", sa.Text()),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("predicted_us", sa.Double()),
        sa.Column("predictor", sa.Text()),
        sa.Column("latency_us", sa.Double()),
        sa.Column("p10_us", sa.Double()),
        sa.Column("p90_us", sa.Double()),
        sa.Column("weight_bytes", sa.BigInteger()),
        sa.Column("floor_us", sa.Double()),
        sa.Column("floor_fraction", sa.Double()),
        sa.Column("tasks", sa.BigInteger()),
        sa.Column("ask_s", sa.Double()),
        sa.Column("lower_s", sa.Double()),
        sa.Column("validate_s", sa.Double()),
        sa.Column("measure_s", sa.Double()),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("flywheel_version", sa.Text()),
        sa.Column("ir_version", sa.Text(), nullable=False),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("optuna", sa.Text()),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("commit", sa.Text()),
        sa.Column("gpu_driver", sa.Text()),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.ForeignKeyConstraint(["campaign"], ["campaigns.name"], name="fk_trials_campaign"),
        sa.UniqueConstraint("campaign", "trial", name="uq_trials_campaign_trial"),
    )
    op.create_index("ix_trials_program_id", "trials", ["program_id"])
    op.create_index("ix_trials_config_id", "trials", ["config_id"])
    op.create_index("ix_trials_model_gpu", "trials", ["model", "gpu"])
