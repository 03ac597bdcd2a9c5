"""How the farm was, minute by minute.

Revision: 0012, after 0011.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a table that nothing else refers to."""
    op.create_table(
        "farm_sample",
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued", sa.Integer, nullable=False),
        sa.Column("groups_up", sa.Integer, nullable=False),
        sa.Column("groups_busy", sa.Integer, nullable=False),
        sa.Column("outbox_lag_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("at", name=op.f("pk_farm_sample")),
    )


def downgrade() -> None:
    """Undo it on an empty database; production moves forward only."""
    op.drop_table("farm_sample")
