"""Which profile a group shall serve next.

Revision: 0011, after 0010.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# A migration that cannot have its lock at once gives up: every request would queue behind it.
LOCK_TIMEOUT = "2s"
NAME = "ck_worker_group_wanted_state"
BEFORE = "wanted_state IN ('draining', 'leaving', 'paused', 'restarting')"
AFTER = "wanted_state IN ('draining', 'leaving', 'paused', 'restarting', 'changing')"


def upgrade() -> None:
    """Add a column and allow one more wish; the table has one row a group."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.add_column("worker_group", sa.Column("wanted_profile", sa.Text))
    _check(AFTER)


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    _check(BEFORE)
    op.drop_column("worker_group", "wanted_profile")


def _check(condition: str) -> None:
    op.drop_constraint(op.f(NAME), "worker_group", type_="check")
    op.create_check_constraint(op.f(NAME), "worker_group", condition)
