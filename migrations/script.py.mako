"""${message}.

Revision: ${up_revision}, after ${down_revision | comma,n}.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

# A migration that cannot have its lock at once gives up: every request would queue behind it.
LOCK_TIMEOUT = "2s"
STATEMENT_TIMEOUT = "60s"


def upgrade() -> None:
    """Add what the next release needs; the previous one must keep working."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
    ${downgrades if downgrades else "pass"}
