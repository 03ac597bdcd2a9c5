"""The dashboard: logins, their sessions, and the audit log, which the database keeps append-only.

Revision: 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# A migration that cannot have its lock at once gives up: every request would queue behind it.
LOCK_TIMEOUT = "2s"
STATEMENT_TIMEOUT = "60s"
AT = sa.DateTime(timezone=True)
NOW = sa.text("now()")
REFUSE = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION '% is append only', TG_TABLE_NAME; END $$
"""
GUARD = """
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
"""


def upgrade() -> None:
    """Add three tables and the guard of the log."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.create_table(
        "admin_user",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("password_hash", sa.Text, nullable=False),
        sa.Column("failures", sa.Integer, server_default="0", nullable=False),
        sa.Column("locked_until", AT),
        sa.Column("disabled_at", AT),
        sa.Column("last_login_at", AT),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'admin')", name=op.f("ck_admin_user_role")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_admin_user")),
        sa.UniqueConstraint("name", name=op.f("uq_admin_user_name")),
    )
    op.create_table(
        "admin_session",
        sa.Column("id", sa.LargeBinary, nullable=False),
        sa.Column("admin_id", sa.Text, nullable=False),
        sa.Column("csrf", sa.Text, nullable=False),
        sa.Column("created_at", AT, server_default=NOW, nullable=False),
        sa.Column("rotated_at", AT, server_default=NOW, nullable=False),
        sa.Column("former_id", sa.LargeBinary),
        sa.Column("expires_at", AT, nullable=False),
        sa.ForeignKeyConstraint(
            ["admin_id"], ["admin_user.id"], name=op.f("fk_admin_session_admin_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_admin_session")),
        sa.UniqueConstraint("former_id", name=op.f("uq_admin_session_former_id")),
    )
    op.create_index(op.f("ix_admin_session_admin_id"), "admin_session", ["admin_id"])
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("at", AT, server_default=NOW, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("before", JSONB),
        sa.Column("after", JSONB),
        sa.Column("ip", sa.Text),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_target", "audit_log", ["target", "id"])
    op.create_index("ix_audit_log_actor", "audit_log", ["actor", "id"])
    op.execute(REFUSE)
    op.execute(GUARD)


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    op.drop_table("audit_log")
    op.execute("DROP FUNCTION refuse_change()")
    op.drop_table("admin_session")
    op.drop_table("admin_user")
