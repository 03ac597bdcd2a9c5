"""Bring the schema to the revision of this release, once, however many replicas start together.

The revisions run under a session advisory lock with a bounded wait; whoever finds the schema at head takes no
lock. A schema that is *newer* than this release is said to be so and left alone: the previous release keeps
serving while the next one is rolled out. `migrations/env.py` takes the connection that this module hands it.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, func, select

from farm.errors import FarmError

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
LOCK_KEY = 0x6D61676932  # "magi2"
WAIT_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True)
class SchemaStatus:
    """Where a database is, and where this release wants it."""

    current: str | None
    newest: str
    is_newer: bool

    @property
    def is_at_head(self) -> bool:
        """Tell whether nothing is to be done."""
        return self.current == self.newest

    @property
    def is_usable(self) -> bool:
        """Tell whether this release can serve on it: at head, or made by a later release."""
        return self.is_at_head or self.is_newer


class MigrationError(FarmError):
    """The schema could not be brought to head."""

    def __init__(self, message: str) -> None:
        super().__init__("schema", 503, message)


def newest_revision() -> str:
    """Return the revision that this code was written for."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if head is None:
        raise MigrationError("the folder migrations/versions holds no revision; the installation is broken")
    return head


def current_revision(conn: Connection) -> str | None:
    """Return the revision of a database; None where it was never migrated."""
    return MigrationContext.configure(conn).get_current_revision()


def status(conn: Connection) -> SchemaStatus:
    """Compare a database with this code; a revision that the code has never heard of counts as newer."""
    current = current_revision(conn)
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    return SchemaStatus(current, newest_revision(), current is not None and current not in known)


def upgrade(engine: Engine, *, wait_s: float = WAIT_S) -> SchemaStatus:
    """Run what is missing and return the status afterwards.

    Raises:
        MigrationError: Another process has held the lock for longer than `wait_s`.
    """
    with engine.connect() as conn:
        found = status(conn)
    if found.is_usable:
        return found
    # Autocommit: a lock that is held outside a transaction is not ended by the idle time-out.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as lock:
        _take_lock(lock, wait_s)
        try:
            return _run(engine, "head")
        finally:
            lock.execute(select(func.pg_advisory_unlock(LOCK_KEY)))


def downgrade(engine: Engine, revision: str = "base") -> SchemaStatus:
    """Undo revisions down to one, or all; for empty databases only."""
    return _run(engine, revision, is_down=True)


def _run(engine: Engine, revision: str, *, is_down: bool = False) -> SchemaStatus:
    config = _config()
    with engine.connect() as conn:
        config.attributes["connection"] = conn
        (command.downgrade if is_down else command.upgrade)(config, revision)
        conn.commit()
        return status(conn)


def _take_lock(conn: Connection, wait_s: float) -> None:
    give_up_s = time.monotonic() + wait_s
    while not conn.execute(select(func.pg_try_advisory_lock(LOCK_KEY))).scalar_one():
        if time.monotonic() > give_up_s:
            raise MigrationError(
                f"another process has been migrating for {wait_s:g} s; wait for it, or end it, and try again"
            )
        time.sleep(POLL_S)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    return config
