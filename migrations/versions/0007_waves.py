"""Waves, quarantine, what an operator sets for a profile, and what a group says of its devices.

Revision: 0007, after 0006.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# A migration that cannot have its lock at once gives up: every request would queue behind it.
LOCK_TIMEOUT = "2s"
STATEMENT_TIMEOUT = "60s"
AT = sa.DateTime(timezone=True)
NOW = sa.text("now()")
EMPTY = sa.text("'{}'::jsonb")
WISHES = "wanted_state IN ('draining', 'leaving', 'paused', 'restarting')"
FORMER_WISHES = "wanted_state IN ('draining', 'paused')"
INDEXES = (
    ("ix_job_wave", "job", ["profile", "wave_key", "account_id", "rank_at", "id"], "state = 'queued'"),
    ("ix_job_attempt_wave_id", "job_attempt", ["wave_id"], "wave_id IS NOT NULL"),
)


def upgrade() -> None:
    """Add tables and columns with defaults, which rewrite nothing, and indexes without blocking writes."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    _create_profile_control()
    _create_wave()
    _create_quarantine()
    op.add_column("job", sa.Column("crashed_waves", sa.Integer, server_default="0", nullable=False))
    op.add_column("job_attempt", sa.Column("measured", JSONB))
    op.add_column("job_attempt", sa.Column("wave_id", sa.Text))
    op.add_column("worker_group", sa.Column("deterministic", sa.Boolean))
    op.add_column(
        "worker_group",
        sa.Column("contract_versions", ARRAY(sa.Integer), server_default=sa.text("'{}'"), nullable=False),
    )
    op.add_column("worker_group", sa.Column("stats", JSONB, server_default=EMPTY, nullable=False))
    _allow_wishes(WISHES)
    with op.get_context().autocommit_block():
        for name, table, columns, where in INDEXES:
            op.create_index(
                name, table, columns, postgresql_where=sa.text(where), postgresql_concurrently=True
            )


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    for name, table, _, _ in INDEXES:
        op.drop_index(name, table)
    _allow_wishes(FORMER_WISHES)
    for table, column in (
        ("worker_group", "stats"),
        ("worker_group", "contract_versions"),
        ("worker_group", "deterministic"),
        ("job_attempt", "wave_id"),
        ("job_attempt", "measured"),
        ("job", "crashed_waves"),
    ):
        op.drop_column(table, column)
    for table in ("quarantine", "wave", "profile_control"):
        op.drop_table(table)


def _allow_wishes(check: str) -> None:
    op.drop_constraint(op.f("ck_worker_group_wanted_state"), "worker_group")
    op.create_check_constraint(op.f("ck_worker_group_wanted_state"), "worker_group", check)


def _create_profile_control() -> None:
    op.create_table(
        "profile_control",
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("paused", sa.Boolean, server_default=sa.text("false"), nullable=False),
        sa.Column("paused_reason", sa.Text),
        sa.Column("max_queued", sa.Integer),
        sa.Column("wave_size", sa.Integer),
        sa.Column("wave_max_wait_s", sa.Integer, server_default="60", nullable=False),
        sa.Column("wave_fill", sa.Text, server_default="pad", nullable=False),
        sa.Column("changed_at", AT, server_default=NOW, nullable=False),
        sa.Column("changed_by", sa.Text),
        sa.CheckConstraint("max_queued >= 0", name=op.f("ck_profile_control_max_queued")),
        sa.CheckConstraint("wave_size >= 1", name=op.f("ck_profile_control_wave_size")),
        sa.CheckConstraint("wave_max_wait_s >= 0", name=op.f("ck_profile_control_wave_max_wait_s")),
        sa.CheckConstraint(
            "wave_fill IN ('pad', 'spill', 'wait')", name=op.f("ck_profile_control_wave_fill")
        ),
        sa.PrimaryKeyConstraint("profile", name=op.f("pk_profile_control")),
    )


def _create_wave() -> None:
    op.create_table(
        "wave",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("wave_key", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("num_slots", sa.Integer, nullable=False),
        sa.Column("num_members", sa.Integer, nullable=False),
        sa.Column("num_ghosts", sa.Integer, nullable=False),
        sa.Column("fill", sa.Text, nullable=False),
        sa.Column("waited_s", sa.Integer, nullable=False),
        sa.Column("formed_at", AT, server_default=NOW, nullable=False),
        sa.Column("ended_at", AT),
        sa.Column("outcome", sa.Text),
        sa.CheckConstraint("fill IN ('full', 'pad', 'alone')", name=op.f("ck_wave_fill")),
        sa.CheckConstraint("outcome IN ('ended', 'crashed', 'given_back')", name=op.f("ck_wave_outcome")),
        sa.CheckConstraint("num_members BETWEEN 1 AND num_slots", name=op.f("ck_wave_num_members")),
        sa.CheckConstraint(
            "num_ghosts BETWEEN num_slots - num_members AND num_slots", name=op.f("ck_wave_num_ghosts")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_wave")),
    )
    op.create_index("ix_wave_formed_at", "wave", ["formed_at"])


def _create_quarantine() -> None:
    op.create_table(
        "quarantine",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("evidence", JSONB, server_default=EMPTY, nullable=False),
        sa.Column("at", AT, server_default=NOW, nullable=False),
        sa.Column("put_by", sa.Text),
        sa.Column("released_at", AT),
        sa.Column("released_by", sa.Text),
        sa.CheckConstraint("reason IN ('poison', 'operator')", name=op.f("ck_quarantine_reason")),
        sa.CheckConstraint(
            "(released_at IS NULL) = (released_by IS NULL)", name=op.f("ck_quarantine_released")
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_quarantine_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_quarantine")),
    )
    op.create_index("ix_quarantine_at", "quarantine", ["at"])
