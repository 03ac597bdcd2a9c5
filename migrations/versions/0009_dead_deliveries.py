"""An index of dead deliveries, which the dashboard counts all the time.

Revision: 0009, after 0008.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

LOCK_TIMEOUT = "2s"
NAME = "ix_webhook_delivery_dead"


def upgrade() -> None:
    """Add the index without blocking writes."""
    with op.get_context().autocommit_block():
        op.create_index(
            NAME,
            "webhook_delivery",
            ["endpoint_id"],
            postgresql_where=sa.text("status = 'dead'"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.drop_index(NAME, "webhook_delivery")
