"""Alembic's entry: run the revisions on the connection that `farm/db/schema.py` hands over.

There is no offline mode and no ini file: the lock, the waiting and the settings are that module's business.
Each revision is its own transaction, so a chain that stops in the middle keeps what it finished.
"""

from alembic import context

from farm.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
