"""Groups of workers.

Revision: 0003, after 0002.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
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
    _create_worker_group()


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.drop_table("worker_group")


def _create_worker_group() -> None:
    op.create_table(
        "worker_group",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("devices", sa.Text, server_default="", nullable=False),
        sa.Column("boot_id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("wanted_state", sa.Text),
        sa.Column("engine_fingerprint", JSONB),
        sa.Column("heartbeat_at", AT, nullable=False),
        sa.Column("started_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "state IN ('booting', 'ready', 'busy', 'draining', 'paused', 'sick', 'gone')",
            name=op.f("ck_worker_group_state"),
        ),
        sa.CheckConstraint(
            "wanted_state IN ('draining', 'paused')", name=op.f("ck_worker_group_wanted_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_group")),
    )


def _create_worker_group() -> None:
    op.create_table(
        "worker_group",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("devices", sa.Text, server_default="", nullable=False),
        sa.Column("boot_id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("wanted_state", sa.Text),
        sa.Column("engine_fingerprint", JSONB),
        sa.Column("heartbeat_at", AT, nullable=False),
        sa.Column("started_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "state IN ('booting', 'ready', 'busy', 'draining', 'paused', 'sick', 'gone')",
            name=op.f("ck_worker_group_state"),
        ),
        sa.CheckConstraint(
            "wanted_state IN ('draining', 'paused')", name=op.f("ck_worker_group_wanted_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_group")),
    )
