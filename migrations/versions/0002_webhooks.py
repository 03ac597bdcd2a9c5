"""Webhooks: endpoints, secrets, messages, deliveries and the log of attempts.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# A migration that cannot have its lock at once gives up: every request would queue behind it.
LOCK_TIMEOUT = "2s"
STATEMENT_TIMEOUT = "60s"
AT = sa.DateTime(timezone=True)
NOW = sa.text("now()")


def upgrade() -> None:
    """Make the tables."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    _create_webhook_endpoint()
    _create_webhook_secret()
    _create_webhook_message()
    _create_webhook_delivery()
    _create_webhook_attempt()


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.drop_table("webhook_attempt")
    op.drop_table("webhook_delivery")
    op.drop_table("webhook_message")
    op.drop_table("webhook_secret")
    op.drop_table("webhook_endpoint")


def _create_webhook_endpoint() -> None:
    op.create_table(
        "webhook_endpoint",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("name", sa.Text, server_default="", nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("event_types", sa.ARRAY(sa.Text), nullable=False),
        sa.Column("enabled", sa.Boolean, server_default=sa.text("true"), nullable=False),
        sa.Column("disabled_reason", sa.Text),
        sa.Column("max_in_flight", sa.Integer, server_default="1", nullable=False),
        sa.Column("failing_since", AT),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("max_in_flight BETWEEN 1 AND 10", name=op.f("ck_webhook_endpoint_max_in_flight")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_webhook_endpoint_account_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
            name=op.f("fk_webhook_endpoint_job_id"),
            ondelete="CASCADE",
            initially="DEFERRED",
            deferrable=True,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoint")),
    )
    op.create_index(
        "ix_webhook_endpoint_account",
        "webhook_endpoint",
        ["account_id"],
        unique=False,
        postgresql_where=sa.text("job_id IS NULL"),
    )
    op.create_index(op.f("ix_webhook_endpoint_job_id"), "webhook_endpoint", ["job_id"], unique=False)


def _create_webhook_secret() -> None:
    op.create_table(
        "webhook_secret",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("endpoint_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, server_default="hmac", nullable=False),
        sa.Column("ciphertext", sa.LargeBinary, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("retire_at", AT),
        sa.CheckConstraint("kind IN ('hmac', 'ed25519')", name=op.f("ck_webhook_secret_kind")),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoint.id"],
            name=op.f("fk_webhook_secret_endpoint_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_secret")),
    )
    op.create_index(op.f("ix_webhook_secret_endpoint_id"), "webhook_secret", ["endpoint_id"], unique=False)


def _create_webhook_message() -> None:
    op.create_table(
        "webhook_message",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("seq", sa.Integer),
        sa.Column("body", JSONB, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_webhook_message_account_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_webhook_message_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_message")),
        sa.UniqueConstraint("job_id", "seq", "type", name=op.f("uq_webhook_message_job_id_seq_type")),
    )


def _create_webhook_delivery() -> None:
    op.create_table(
        "webhook_delivery",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("message_id", sa.Text, nullable=False),
        sa.Column("endpoint_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, server_default="pending", nullable=False),
        sa.Column("attempts", sa.Integer, server_default="0", nullable=False),
        sa.Column("next_attempt_at", AT, server_default=NOW, nullable=False),
        sa.Column("lease_until", AT),
        sa.Column("lease_token", sa.Text),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_error", sa.Text),
        sa.CheckConstraint(
            "status IN ('pending', 'leased', 'ok', 'dead', 'canceled')",
            name=op.f("ck_webhook_delivery_status"),
        ),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoint.id"],
            name=op.f("fk_webhook_delivery_endpoint_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["message_id"],
            ["webhook_message.id"],
            name=op.f("fk_webhook_delivery_message_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_delivery")),
        sa.UniqueConstraint(
            "message_id", "endpoint_id", name=op.f("uq_webhook_delivery_message_id_endpoint_id")
        ),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )
    op.create_index(
        "ix_webhook_delivery_due",
        "webhook_delivery",
        ["endpoint_id", "next_attempt_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_index(
        op.f("ix_webhook_delivery_endpoint_id"), "webhook_delivery", ["endpoint_id"], unique=False
    )
    op.create_index(
        "ix_webhook_delivery_leased",
        "webhook_delivery",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("status = 'leased'"),
    )
    op.create_index(
        "ix_webhook_delivery_pending",
        "webhook_delivery",
        ["next_attempt_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )


def _create_webhook_attempt() -> None:
    op.create_table(
        "webhook_attempt",
        sa.Column("delivery_id", sa.Text, nullable=False),
        sa.Column("n", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.Column("duration_ms", sa.Integer, nullable=False),
        sa.Column("http_status", sa.Integer),
        sa.Column("error", sa.Text),
        sa.Column("response_excerpt", sa.Text),
        sa.Column("resolved_ip", sa.Text),
        sa.ForeignKeyConstraint(
            ["delivery_id"],
            ["webhook_delivery.id"],
            name=op.f("fk_webhook_attempt_delivery_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("delivery_id", "n", name=op.f("pk_webhook_attempt")),
    )


def _create_webhook_endpoint() -> None:
    op.create_table(
        "webhook_endpoint",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("name", sa.Text, server_default="", nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("event_types", sa.ARRAY(sa.Text), nullable=False),
        sa.Column("enabled", sa.Boolean, server_default=sa.text("true"), nullable=False),
        sa.Column("disabled_reason", sa.Text),
        sa.Column("max_in_flight", sa.Integer, server_default="1", nullable=False),
        sa.Column("failing_since", AT),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("max_in_flight BETWEEN 1 AND 10", name=op.f("ck_webhook_endpoint_max_in_flight")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_webhook_endpoint_account_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
            name=op.f("fk_webhook_endpoint_job_id"),
            ondelete="CASCADE",
            initially="DEFERRED",
            deferrable=True,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoint")),
    )
    op.create_index(
        "ix_webhook_endpoint_account",
        "webhook_endpoint",
        ["account_id"],
        unique=False,
        postgresql_where=sa.text("job_id IS NULL"),
    )
    op.create_index(op.f("ix_webhook_endpoint_job_id"), "webhook_endpoint", ["job_id"], unique=False)


def _create_webhook_secret() -> None:
    op.create_table(
        "webhook_secret",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("endpoint_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, server_default="hmac", nullable=False),
        sa.Column("ciphertext", sa.LargeBinary, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("retire_at", AT),
        sa.CheckConstraint("kind IN ('hmac', 'ed25519')", name=op.f("ck_webhook_secret_kind")),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoint.id"],
            name=op.f("fk_webhook_secret_endpoint_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_secret")),
    )
    op.create_index(op.f("ix_webhook_secret_endpoint_id"), "webhook_secret", ["endpoint_id"], unique=False)


def _create_webhook_message() -> None:
    op.create_table(
        "webhook_message",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("seq", sa.Integer),
        sa.Column("body", JSONB, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_webhook_message_account_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_webhook_message_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_message")),
        sa.UniqueConstraint("job_id", "seq", "type", name=op.f("uq_webhook_message_job_id_seq_type")),
    )


def _create_webhook_delivery() -> None:
    op.create_table(
        "webhook_delivery",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("message_id", sa.Text, nullable=False),
        sa.Column("endpoint_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, server_default="pending", nullable=False),
        sa.Column("attempts", sa.Integer, server_default="0", nullable=False),
        sa.Column("next_attempt_at", AT, server_default=NOW, nullable=False),
        sa.Column("lease_until", AT),
        sa.Column("lease_token", sa.Text),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_error", sa.Text),
        sa.CheckConstraint(
            "status IN ('pending', 'leased', 'ok', 'dead', 'canceled')",
            name=op.f("ck_webhook_delivery_status"),
        ),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoint.id"],
            name=op.f("fk_webhook_delivery_endpoint_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["message_id"],
            ["webhook_message.id"],
            name=op.f("fk_webhook_delivery_message_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_delivery")),
        sa.UniqueConstraint(
            "message_id", "endpoint_id", name=op.f("uq_webhook_delivery_message_id_endpoint_id")
        ),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )
    op.create_index(
        "ix_webhook_delivery_due",
        "webhook_delivery",
        ["endpoint_id", "next_attempt_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_index(
        op.f("ix_webhook_delivery_endpoint_id"), "webhook_delivery", ["endpoint_id"], unique=False
    )
    op.create_index(
        "ix_webhook_delivery_leased",
        "webhook_delivery",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("status = 'leased'"),
    )
    op.create_index(
        "ix_webhook_delivery_pending",
        "webhook_delivery",
        ["next_attempt_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )


def _create_webhook_attempt() -> None:
    op.create_table(
        "webhook_attempt",
        sa.Column("delivery_id", sa.Text, nullable=False),
        sa.Column("n", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.Column("duration_ms", sa.Integer, nullable=False),
        sa.Column("http_status", sa.Integer),
        sa.Column("error", sa.Text),
        sa.Column("response_excerpt", sa.Text),
        sa.Column("resolved_ip", sa.Text),
        sa.ForeignKeyConstraint(
            ["delivery_id"],
            ["webhook_delivery.id"],
            name=op.f("fk_webhook_attempt_delivery_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("delivery_id", "n", name=op.f("pk_webhook_attempt")),
    )
