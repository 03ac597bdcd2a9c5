"""Webhooks: payload mode, pauses, soft deletion, rounds of attempts, and the log of one endpoint by page.

Revision: 0004, after 0003.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# A migration that cannot have its lock at once gives up: every request would queue behind it.
LOCK_TIMEOUT = "2s"
STATEMENT_TIMEOUT = "60s"
AT = sa.DateTime(timezone=True)
NOW = sa.text("now()")


def upgrade() -> None:
    """Add columns with defaults, which rewrite nothing, and swap one index without blocking writes."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.add_column(
        "webhook_endpoint", sa.Column("payload_mode", sa.Text, server_default="thin", nullable=False)
    )
    op.add_column("webhook_endpoint", sa.Column("paused_until", AT))
    op.add_column("webhook_endpoint", sa.Column("updated_at", AT, server_default=NOW, nullable=False))
    op.add_column("webhook_endpoint", sa.Column("deleted_at", AT))
    op.create_check_constraint(
        op.f("ck_webhook_endpoint_payload_mode"), "webhook_endpoint", "payload_mode IN ('thin', 'full')"
    )
    op.add_column("webhook_message", sa.Column("full_data", JSONB))
    op.add_column(
        "webhook_delivery", sa.Column("round_start", sa.Integer, server_default="0", nullable=False)
    )
    op.add_column(
        "webhook_delivery", sa.Column("max_attempts", sa.Integer, server_default="10", nullable=False)
    )
    with op.get_context().autocommit_block():
        op.create_index(
            "ix_webhook_delivery_endpoint",
            "webhook_delivery",
            ["endpoint_id", "id"],
            unique=False,
            postgresql_concurrently=True,
        )
        op.drop_index(
            op.f("ix_webhook_delivery_endpoint_id"), "webhook_delivery", postgresql_concurrently=True
        )


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.create_index(
        op.f("ix_webhook_delivery_endpoint_id"), "webhook_delivery", ["endpoint_id"], unique=False
    )
    op.drop_index("ix_webhook_delivery_endpoint", "webhook_delivery")
    op.drop_column("webhook_delivery", "max_attempts")
    op.drop_column("webhook_delivery", "round_start")
    op.drop_column("webhook_message", "full_data")
    op.drop_constraint(op.f("ck_webhook_endpoint_payload_mode"), "webhook_endpoint")
    op.drop_column("webhook_endpoint", "deleted_at")
    op.drop_column("webhook_endpoint", "updated_at")
    op.drop_column("webhook_endpoint", "paused_until")
    op.drop_column("webhook_endpoint", "payload_mode")
