"""Migrations build exactly the tables of the metadata, once, and can be undone while nothing is stored."""

import threading

import pytest
import sqlalchemy as sa
from sqlalchemy import text

from farm.db import schema
from farm.db.session import make_engine
from farm.db.tables import metadata
from tests.service.driver import in_threads

CATALOG = {
    "column": "SELECT table_name, column_name, data_type, udt_name, is_nullable, column_default, is_identity"
    " FROM information_schema.columns WHERE table_schema = 'public'",
    "constraint": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)"
    " FROM pg_constraint WHERE connamespace = 'public'::regnamespace",
    "index": "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "option": "SELECT relname, reloptions FROM pg_class"
    " WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'",
}


def catalog(engine):
    with engine.connect() as conn:
        rows = [
            (kind, *map(str, row)) for kind, query in CATALOG.items() for row in conn.execute(text(query))
        ]
    return {row for row in rows if "alembic_version" not in str(row)}


@pytest.fixture
def empty(new_database, settings):
    """Return a function that makes an engine on a new, empty database."""
    engines = []

    def make():
        url = new_database("template1").replace("postgresql://", "postgresql+psycopg://")
        engines.append(make_engine(settings.model_copy(update={"database_url": url}), application="test"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


def test_the_migrations_build_what_the_metadata_says(empty):
    migrated, created = empty(), empty()
    schema.upgrade(migrated)
    metadata.create_all(created)
    assert catalog(migrated) == catalog(created)
    assert len(catalog(migrated)) > 300


def test_each_revision_can_be_undone_on_an_empty_database_and_done_again(empty):
    engine = empty()
    schema.upgrade(engine)
    built = catalog(engine)
    for revision in ("0002", "0001", "base"):
        schema.downgrade(engine, revision)
    assert catalog(engine) == set()
    schema.upgrade(engine)
    assert catalog(engine) == built


def test_the_status_tells_missing_current_and_newer_schemas_apart(empty):
    engine = empty()
    with engine.connect() as conn:
        missing = schema.status(conn)
    assert (missing.current, missing.is_at_head, missing.is_usable) == (None, False, False)
    current = schema.upgrade(engine)
    assert (current.current, current.is_at_head, current.is_newer) == (schema.newest_revision(), True, False)
    with engine.begin() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        newer = schema.status(conn)
    assert (newer.is_newer, newer.is_usable, newer.is_at_head) == (True, True, False)


def test_a_newer_schema_is_left_alone(empty):
    engine = empty()
    schema.upgrade(engine)
    with engine.begin() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert schema.upgrade(engine).current == "9999"


def test_replicas_that_start_together_migrate_once(empty):
    engine = empty()
    barrier = threading.Barrier(3)

    def start():
        barrier.wait()
        return schema.upgrade(engine)

    assert all(status.is_at_head for status in in_threads([start] * 3))


def test_a_replica_at_head_does_not_wait_for_the_lock(empty):
    engine = empty()
    schema.upgrade(engine)
    with engine.connect() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_lock(schema.LOCK_KEY)))
        assert schema.upgrade(engine, wait_s=0).is_at_head


def test_the_wait_for_another_migration_is_bounded(empty):
    engine = empty()
    with engine.connect() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_lock(schema.LOCK_KEY)))
        with pytest.raises(schema.MigrationError, match="another process has been migrating"):
            schema.upgrade(engine, wait_s=0.2)


def test_a_migration_that_cannot_have_its_lock_gives_up(empty):
    engine = empty()
    schema.upgrade(engine)
    schema.downgrade(engine, "0001")
    with engine.begin() as conn:
        # 0002 refers to job, so it needs a lock that conflicts with this one.
        conn.execute(text("LOCK TABLE job IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(sa.exc.OperationalError, match="lock timeout"):
            schema.upgrade(engine)
