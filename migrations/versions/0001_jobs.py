"""Accounts, keys, jobs with their attempts, events and assets, and the outbox.

Revision: 0001, after nothing.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
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
    _create_account()
    _create_account_usage()
    _create_api_key()
    _create_job()
    _create_asset()
    _create_job_attempt()
    _create_job_event()
    _create_outbox()


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.drop_constraint(op.f("fk_job_input_asset_id"), "job")
    op.drop_table("outbox")
    op.drop_table("job_event")
    op.drop_table("job_attempt")
    op.drop_table("asset")
    op.drop_table("job")
    op.drop_table("api_key")
    op.drop_table("account_usage")
    op.drop_table("account")


def _create_account() -> None:
    op.create_table(
        "account",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("status", sa.Text, server_default="active", nullable=False),
        sa.Column("limits", JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_account_status")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_account")),
        sa.UniqueConstraint("name", name=op.f("uq_account_name")),
    )


def _create_account_usage() -> None:
    op.create_table(
        "account_usage",
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("queued", sa.Integer, server_default="0", nullable=False),
        sa.Column("running", sa.Integer, server_default="0", nullable=False),
        sa.CheckConstraint("queued >= 0", name=op.f("ck_account_usage_queued")),
        sa.CheckConstraint("running >= 0", name=op.f("ck_account_usage_running")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_account_usage_account_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_account_usage")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )


def _create_api_key() -> None:
    op.create_table(
        "api_key",
        sa.Column("id8", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, server_default="", nullable=False),
        sa.Column("env", sa.Text, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("last4", sa.Text, nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text), nullable=False),
        sa.Column("cidrs", sa.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("expires_at", AT),
        sa.Column("revoked_at", AT),
        sa.Column("last_used_at", AT),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_api_key_account_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id8", name=op.f("pk_api_key")),
    )
    op.create_index(op.f("ix_api_key_account_id"), "api_key", ["account_id"])


def _create_job() -> None:
    op.create_table(
        "job",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("phase", sa.Text),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("requested_profile", sa.Text, server_default="auto", nullable=False),
        sa.Column("priority", sa.SmallInteger, server_default="0", nullable=False),
        sa.Column("prompt", sa.Text, nullable=False),
        sa.Column("params", JSONB, nullable=False),
        sa.Column("contract_version", sa.Integer, nullable=False),
        sa.Column("wave_key", sa.Text, nullable=False),
        sa.Column("input_asset_id", sa.Text),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, server_default="0", nullable=False),
        sa.Column("progress", sa.SmallInteger, server_default="0", nullable=False),
        sa.Column("epoch", sa.Integer, server_default="0", nullable=False),
        sa.Column("attempts", sa.Integer, server_default="0", nullable=False),
        sa.Column("infra_losses", sa.Integer, server_default="0", nullable=False),
        sa.Column("preemptions", sa.Integer, server_default="0", nullable=False),
        sa.Column("crash_count", sa.Integer, server_default="0", nullable=False),
        sa.Column("engine_errors", sa.Integer, server_default="0", nullable=False),
        sa.Column("upload_failures", sa.Integer, server_default="0", nullable=False),
        sa.Column("crash_groups", sa.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("max_attempts", sa.Integer, server_default="3", nullable=False),
        sa.Column("retry_count", sa.Integer, server_default="0", nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("avoid_group", sa.Text),
        sa.Column("lease_until", AT),
        sa.Column("not_before", AT, server_default=NOW, nullable=False),
        sa.Column("queue_deadline", AT, nullable=False),
        sa.Column("expires_in_s", sa.Integer, nullable=False),
        sa.Column("exec_timeout_s", sa.Integer, nullable=False),
        sa.Column("attempt_deadline", AT),
        sa.Column("cancel_requested_at", AT),
        sa.Column("cancel_by", sa.Text),
        sa.Column("deleted_at", AT),
        sa.Column("error", JSONB),
        sa.Column("result", JSONB),
        sa.Column("notices", JSONB, server_default=sa.text("'[]'::jsonb"), nullable=False),
        sa.Column("metadata", JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("user_tag", sa.Text),
        sa.Column("retention_s", sa.Integer, nullable=False),
        sa.Column("seq", sa.Integer, server_default="1", nullable=False),
        sa.Column("rank_at", AT, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("queued_at", AT, server_default=NOW, nullable=False),
        sa.Column("started_at", AT),
        sa.Column("running_at", AT),
        sa.Column("uploading_at", AT),
        sa.Column("finished_at", AT),
        sa.CheckConstraint(
            "(lease_until IS NOT NULL) = (state IN ('starting', 'running', 'uploading'))",
            name=op.f("ck_job_lease"),
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'starting', 'running', 'uploading', 'succeeded', "
            "'failed', 'canceled', 'expired')",
            name=op.f("ck_job_state"),
        ),
        sa.CheckConstraint("priority BETWEEN -10 AND 10", name=op.f("ck_job_priority")),
        sa.CheckConstraint("progress BETWEEN 0 AND 100", name=op.f("ck_job_progress")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_job_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )
    op.create_index("ix_job_account_state", "job", ["account_id", "state"])
    op.create_index(
        "ix_job_claim",
        "job",
        ["profile", "account_id", "rank_at", "id"],
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_job_deleted", "job", ["deleted_at"], postgresql_where=sa.text("deleted_at IS NOT NULL")
    )
    op.create_index(
        "ix_job_finished", "job", ["profile", "finished_at"], postgresql_where=sa.text("state = 'succeeded'")
    )
    op.create_index(
        "ix_job_lease",
        "job",
        ["lease_until"],
        postgresql_where=sa.text("state IN ('starting', 'running', 'uploading')"),
    )
    op.create_index(
        "ix_job_list",
        "job",
        ["account_id", sa.text("created_at DESC"), sa.text("id DESC")],
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index("ix_job_metadata", "job", ["metadata"], postgresql_using="gin")
    op.create_index(
        "ix_job_rank", "job", ["profile", "rank_at", "id"], postgresql_where=sa.text("state = 'queued'")
    )
    op.create_index("ix_job_ttl", "job", ["queue_deadline"], postgresql_where=sa.text("state = 'queued'"))


def _create_asset() -> None:
    op.create_table(
        "asset",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("epoch", sa.Integer),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("media_type", sa.Text, nullable=False),
        sa.Column("width", sa.Integer),
        sa.Column("height", sa.Integer),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("expires_at", AT),
        sa.Column("deleted_at", AT),
        sa.CheckConstraint("(kind = 'input') = (job_id IS NULL)", name=op.f("ck_asset_owner")),
        sa.CheckConstraint(
            "kind IN ('input', 'video', 'thumb', 'sprite', 'audio', 'meta')", name=op.f("ck_asset_kind")
        ),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_asset_account_id")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_asset_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_asset")),
    )
    op.create_index(
        "ux_asset_input",
        "asset",
        ["account_id", "sha256"],
        unique=True,
        postgresql_where=sa.text("kind = 'input' AND deleted_at IS NULL"),
    )
    op.create_index(
        "ux_asset_job_kind",
        "asset",
        ["job_id", "kind"],
        unique=True,
        postgresql_where=sa.text("job_id IS NOT NULL"),
    )
    op.create_foreign_key(op.f("fk_job_input_asset_id"), "job", "asset", ["input_asset_id"], ["id"])


def _create_job_attempt() -> None:
    op.create_table(
        "job_attempt",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("worker_boot_id", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("queued_at", AT, nullable=False),
        sa.Column("started_at", AT, nullable=False),
        sa.Column("running_at", AT),
        sa.Column("uploading_at", AT),
        sa.Column("ended_at", AT),
        sa.Column("outcome", sa.Text),
        sa.Column("error", JSONB),
        sa.Column("timings", JSONB),
        sa.Column("peak_memory_mb", sa.Integer),
        sa.Column("cleaned_at", AT),
        sa.CheckConstraint(
            "outcome IN ('succeeded', 'failed', 'canceled', 'requeued')", name=op.f("ck_job_attempt_outcome")
        ),
        sa.CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name=op.f("ck_job_attempt_ended")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_job_attempt_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_job_attempt")),
    )
    op.create_index(
        "ix_job_attempt_garbage",
        "job_attempt",
        ["ended_at"],
        postgresql_where=sa.text(
            "uploading_at IS NOT NULL AND cleaned_at IS NULL AND outcome <> 'succeeded'"
        ),
    )
    op.create_index(
        "ux_job_attempt_succeeded",
        "job_attempt",
        ["job_id"],
        unique=True,
        postgresql_where=sa.text("outcome = 'succeeded'"),
    )


def _create_job_event() -> None:
    op.create_table(
        "job_event",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("seq", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("data", JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_event_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_job_event")),
    )


def _create_outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger, sa.Identity(always=False), nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("payload", JSONB, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("locked_until", AT),
        sa.Column("sent_at", AT),
        sa.Column("attempts", sa.Integer, server_default="0", nullable=False),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )
    op.create_index("ix_outbox_sent", "outbox", ["sent_at"], postgresql_where=sa.text("sent_at IS NOT NULL"))
    op.create_index("ix_outbox_unsent", "outbox", ["id"], postgresql_where=sa.text("sent_at IS NULL"))


def _create_account() -> None:
    op.create_table(
        "account",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("status", sa.Text, server_default="active", nullable=False),
        sa.Column("limits", JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_account_status")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_account")),
        sa.UniqueConstraint("name", name=op.f("uq_account_name")),
    )


def _create_account_usage() -> None:
    op.create_table(
        "account_usage",
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("queued", sa.Integer, server_default="0", nullable=False),
        sa.Column("running", sa.Integer, server_default="0", nullable=False),
        sa.CheckConstraint("queued >= 0", name=op.f("ck_account_usage_queued")),
        sa.CheckConstraint("running >= 0", name=op.f("ck_account_usage_running")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_account_usage_account_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_account_usage")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )


def _create_api_key() -> None:
    op.create_table(
        "api_key",
        sa.Column("id8", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, server_default="", nullable=False),
        sa.Column("env", sa.Text, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("last4", sa.Text, nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text), nullable=False),
        sa.Column("cidrs", sa.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("expires_at", AT),
        sa.Column("revoked_at", AT),
        sa.Column("last_used_at", AT),
        sa.ForeignKeyConstraint(
            ["account_id"], ["account.id"], name=op.f("fk_api_key_account_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id8", name=op.f("pk_api_key")),
    )
    op.create_index(op.f("ix_api_key_account_id"), "api_key", ["account_id"])


def _create_job() -> None:
    op.create_table(
        "job",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("phase", sa.Text),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("requested_profile", sa.Text, server_default="auto", nullable=False),
        sa.Column("priority", sa.SmallInteger, server_default="0", nullable=False),
        sa.Column("prompt", sa.Text, nullable=False),
        sa.Column("params", JSONB, nullable=False),
        sa.Column("contract_version", sa.Integer, nullable=False),
        sa.Column("wave_key", sa.Text, nullable=False),
        sa.Column("input_asset_id", sa.Text),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, server_default="0", nullable=False),
        sa.Column("progress", sa.SmallInteger, server_default="0", nullable=False),
        sa.Column("epoch", sa.Integer, server_default="0", nullable=False),
        sa.Column("attempts", sa.Integer, server_default="0", nullable=False),
        sa.Column("infra_losses", sa.Integer, server_default="0", nullable=False),
        sa.Column("preemptions", sa.Integer, server_default="0", nullable=False),
        sa.Column("crash_count", sa.Integer, server_default="0", nullable=False),
        sa.Column("engine_errors", sa.Integer, server_default="0", nullable=False),
        sa.Column("upload_failures", sa.Integer, server_default="0", nullable=False),
        sa.Column("crash_groups", sa.ARRAY(sa.Text), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("max_attempts", sa.Integer, server_default="3", nullable=False),
        sa.Column("retry_count", sa.Integer, server_default="0", nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("avoid_group", sa.Text),
        sa.Column("lease_until", AT),
        sa.Column("not_before", AT, server_default=NOW, nullable=False),
        sa.Column("queue_deadline", AT, nullable=False),
        sa.Column("expires_in_s", sa.Integer, nullable=False),
        sa.Column("exec_timeout_s", sa.Integer, nullable=False),
        sa.Column("attempt_deadline", AT),
        sa.Column("cancel_requested_at", AT),
        sa.Column("cancel_by", sa.Text),
        sa.Column("deleted_at", AT),
        sa.Column("error", JSONB),
        sa.Column("result", JSONB),
        sa.Column("notices", JSONB, server_default=sa.text("'[]'::jsonb"), nullable=False),
        sa.Column("metadata", JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("user_tag", sa.Text),
        sa.Column("retention_s", sa.Integer, nullable=False),
        sa.Column("seq", sa.Integer, server_default="1", nullable=False),
        sa.Column("rank_at", AT, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("queued_at", AT, server_default=NOW, nullable=False),
        sa.Column("started_at", AT),
        sa.Column("running_at", AT),
        sa.Column("uploading_at", AT),
        sa.Column("finished_at", AT),
        sa.CheckConstraint(
            "(lease_until IS NOT NULL) = (state IN ('starting', 'running', 'uploading'))",
            name=op.f("ck_job_lease"),
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'starting', 'running', 'uploading', 'succeeded', "
            "'failed', 'canceled', 'expired')",
            name=op.f("ck_job_state"),
        ),
        sa.CheckConstraint("priority BETWEEN -10 AND 10", name=op.f("ck_job_priority")),
        sa.CheckConstraint("progress BETWEEN 0 AND 100", name=op.f("ck_job_progress")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_job_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )
    op.create_index("ix_job_account_state", "job", ["account_id", "state"])
    op.create_index(
        "ix_job_claim",
        "job",
        ["profile", "account_id", "rank_at", "id"],
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_job_deleted", "job", ["deleted_at"], postgresql_where=sa.text("deleted_at IS NOT NULL")
    )
    op.create_index(
        "ix_job_finished", "job", ["profile", "finished_at"], postgresql_where=sa.text("state = 'succeeded'")
    )
    op.create_index(
        "ix_job_lease",
        "job",
        ["lease_until"],
        postgresql_where=sa.text("state IN ('starting', 'running', 'uploading')"),
    )
    op.create_index(
        "ix_job_list",
        "job",
        ["account_id", sa.text("created_at DESC"), sa.text("id DESC")],
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index("ix_job_metadata", "job", ["metadata"], postgresql_using="gin")
    op.create_index(
        "ix_job_rank", "job", ["profile", "rank_at", "id"], postgresql_where=sa.text("state = 'queued'")
    )
    op.create_index("ix_job_ttl", "job", ["queue_deadline"], postgresql_where=sa.text("state = 'queued'"))


def _create_asset() -> None:
    op.create_table(
        "asset",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("epoch", sa.Integer),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("media_type", sa.Text, nullable=False),
        sa.Column("width", sa.Integer),
        sa.Column("height", sa.Integer),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("expires_at", AT),
        sa.Column("deleted_at", AT),
        sa.CheckConstraint("(kind = 'input') = (job_id IS NULL)", name=op.f("ck_asset_owner")),
        sa.CheckConstraint(
            "kind IN ('input', 'video', 'thumb', 'sprite', 'audio', 'meta')", name=op.f("ck_asset_kind")
        ),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_asset_account_id")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_asset_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_asset")),
    )
    op.create_index(
        "ux_asset_input",
        "asset",
        ["account_id", "sha256"],
        unique=True,
        postgresql_where=sa.text("kind = 'input' AND deleted_at IS NULL"),
    )
    op.create_index(
        "ux_asset_job_kind",
        "asset",
        ["job_id", "kind"],
        unique=True,
        postgresql_where=sa.text("job_id IS NOT NULL"),
    )
    op.create_foreign_key(op.f("fk_job_input_asset_id"), "job", "asset", ["input_asset_id"], ["id"])


def _create_job_attempt() -> None:
    op.create_table(
        "job_attempt",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("worker_boot_id", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("queued_at", AT, nullable=False),
        sa.Column("started_at", AT, nullable=False),
        sa.Column("running_at", AT),
        sa.Column("uploading_at", AT),
        sa.Column("ended_at", AT),
        sa.Column("outcome", sa.Text),
        sa.Column("error", JSONB),
        sa.Column("timings", JSONB),
        sa.Column("peak_memory_mb", sa.Integer),
        sa.Column("cleaned_at", AT),
        sa.CheckConstraint(
            "outcome IN ('succeeded', 'failed', 'canceled', 'requeued')", name=op.f("ck_job_attempt_outcome")
        ),
        sa.CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name=op.f("ck_job_attempt_ended")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_job_attempt_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_job_attempt")),
    )
    op.create_index(
        "ix_job_attempt_garbage",
        "job_attempt",
        ["ended_at"],
        postgresql_where=sa.text(
            "uploading_at IS NOT NULL AND cleaned_at IS NULL AND outcome <> 'succeeded'"
        ),
    )
    op.create_index(
        "ux_job_attempt_succeeded",
        "job_attempt",
        ["job_id"],
        unique=True,
        postgresql_where=sa.text("outcome = 'succeeded'"),
    )


def _create_job_event() -> None:
    op.create_table(
        "job_event",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("seq", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("data", JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_event_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_job_event")),
    )


def _create_outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger, sa.Identity(always=False), nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("payload", JSONB, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("locked_until", AT),
        sa.Column("sent_at", AT),
        sa.Column("attempts", sa.Integer, server_default="0", nullable=False),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.01"},
    )
    op.create_index("ix_outbox_sent", "outbox", ["sent_at"], postgresql_where=sa.text("sent_at IS NOT NULL"))
    op.create_index("ix_outbox_unsent", "outbox", ["id"], postgresql_where=sa.text("sent_at IS NULL"))
