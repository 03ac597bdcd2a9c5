"""Bring a database to the newest schema and say which revision it has; Alembic in process.

`migrations/env.py` takes the connection from `config.attributes["connection"]`, where this module puts it, so
the same migrations run from the command line, embedded mode and tests. Two upgrades at once wait for each
other. It never goes back: a migration is undone by restoring a backup.
"""

from pathlib import Path

import alembic.command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
_UPGRADE_LOCK = 7_205_759_403  # any constant: the advisory lock that upgrades share


def newest_revision() -> str:
    """Return the revision that this code was written for."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if head is None:
        raise RuntimeError(f"{MIGRATIONS} holds no migrations")
    return head


def current_revision(conn: Connection) -> str | None:
    """Return the revision of a database; None where it was never migrated."""
    return MigrationContext.configure(conn).get_current_revision()


def upgrade(engine: Engine) -> None:
    """Run all migrations that a database lacks."""
    with engine.connect() as lock, engine.connect() as conn:
        lock.execute(text("SELECT pg_advisory_lock(:number)"), {"number": _UPGRADE_LOCK})
        config = _config()
        config.attributes["connection"] = conn
        alembic.command.upgrade(config, "head")
        lock.execute(text("SELECT pg_advisory_unlock(:number)"), {"number": _UPGRADE_LOCK})


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config
