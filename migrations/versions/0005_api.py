"""The whole API: idempotency, batches, reuse, GPU-seconds, and the indexes of streams and retention.

Revision: 0005, after 0004.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# A migration that cannot have its lock at once gives up: every request would queue behind it.
LOCK_TIMEOUT = "2s"
STATEMENT_TIMEOUT = "60s"
AT = sa.DateTime(timezone=True)
NOW = sa.text("now()")
EMPTY = sa.text("'{}'::jsonb")
INDEXES = (
    ("ix_job_batch", "job", ["batch_id"], "batch_id IS NOT NULL"),
    ("ix_job_input", "job", ["input_asset_id"], "input_asset_id IS NOT NULL"),
    ("ix_job_reuse", "job", ["account_id", "reuse_key"], "state = 'succeeded'"),
    ("ix_job_ended", "job", ["finished_at"], "finished_at IS NOT NULL"),
    ("ix_job_event_at", "job_event", ["at"], None),
    ("ix_asset_expires_at", "asset", ["expires_at"], "deleted_at IS NULL"),
    ("ix_webhook_attempt_at", "webhook_attempt", ["at"], None),
)


def upgrade() -> None:
    """Add tables and columns with defaults, which rewrite nothing, and indexes without blocking writes."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.create_table(
        "idempotency_key",
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.SmallInteger),
        sa.Column("answer", sa.LargeBinary),
        sa.Column("job_id", sa.Text),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_idempotency_key_account_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("account_id", "route", "key", name=op.f("pk_idempotency_key")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )
    op.create_index("ix_idempotency_key_created_at", "idempotency_key", ["created_at"])
    op.create_table(
        "batch",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("done", sa.Integer, server_default="0", nullable=False),
        sa.Column("metadata", JSONB, server_default=EMPTY, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("finished_at", AT),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_batch_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
    )
    op.add_column("account_usage", sa.Column("day", sa.Date))
    op.add_column("account_usage", sa.Column("gpu_s_used", sa.BigInteger, server_default="0", nullable=False))
    op.add_column(
        "account_usage", sa.Column("gpu_s_reserved", sa.BigInteger, server_default="0", nullable=False)
    )
    op.create_check_constraint(
        op.f("ck_account_usage_gpu_s"), "account_usage", "gpu_s_used >= 0 AND gpu_s_reserved >= 0"
    )
    op.add_column("job", sa.Column("batch_id", sa.Text))
    op.create_foreign_key(op.f("fk_job_batch_id"), "job", "batch", ["batch_id"], ["id"])
    op.add_column("job", sa.Column("reuse", sa.Text, server_default="off", nullable=False))
    op.add_column("job", sa.Column("reuse_key", sa.Text))
    op.add_column("job", sa.Column("gpus", sa.Integer, server_default="1", nullable=False))
    op.add_column("job", sa.Column("gpu_s_reserved", sa.Integer, server_default="0", nullable=False))
    op.add_column("webhook_endpoint", sa.Column("batch_id", sa.Text))
    op.create_foreign_key(
        op.f("fk_webhook_endpoint_batch_id"),
        "webhook_endpoint",
        "batch",
        ["batch_id"],
        ["id"],
        ondelete="CASCADE",
    )
    with op.get_context().autocommit_block():
        for name, table, columns, where in INDEXES:
            op.create_index(
                name,
                table,
                columns,
                postgresql_where=sa.text(where) if where else None,
                postgresql_concurrently=True,
            )
        op.create_index(
            op.f("ix_webhook_endpoint_batch_id"),
            "webhook_endpoint",
            ["batch_id"],
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    for name, table, _, _ in INDEXES:
        op.drop_index(name, table)
    op.drop_column("webhook_endpoint", "batch_id")
    for column in ("gpu_s_reserved", "gpus", "reuse_key", "reuse", "batch_id"):
        op.drop_column("job", column)
    op.drop_constraint(op.f("ck_account_usage_gpu_s"), "account_usage")
    for column in ("gpu_s_reserved", "gpu_s_used", "day"):
        op.drop_column("account_usage", column)
    op.drop_table("batch")
    op.drop_table("idempotency_key")
