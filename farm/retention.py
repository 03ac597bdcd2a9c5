"""What is kept for how long: which objects and rows are over, in small batches, found by time alone.

Objects go first and rows afterwards; a kill in between only repeats a deletion. Nothing is remembered between
two runs, so a sweep that was killed goes on where it was. The order of store and database is the sweep's
business (`worker/sweeps.py`).
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, func, or_, select, text, update

from farm.assets import KEEP_UNUSED
from farm.clock import db_now, db_seconds
from farm.db.tables import asset, batch, job, job_attempt, wave
from farm.jobs.states import ACTIVE

LIMIT = 200
DAY_S = 86_400
# An image that ended a moment ago may be in the hands of a request that has renewed it already.
IMAGE_GRACE_S = 3_600


@dataclass(frozen=True)
class Retention:
    """Days that rows are kept after the end of a job; objects have an end of their own."""

    job_days: int = 90
    event_days: int = 30


DEFAULT_RETENTION = Retention()
_OLD_EVENTS = text(
    """
    DELETE FROM job_event WHERE (job_id, seq) IN (
        SELECT e.job_id, e.seq FROM job_event e JOIN job j ON j.id = e.job_id
        WHERE e.at < clock_timestamp() - make_interval(days => :days)
          AND j.finished_at < clock_timestamp() - make_interval(days => :days)
        ORDER BY e.at LIMIT :limit)
    """
)


def expired_outputs(conn: Connection) -> dict[str, str]:
    """Return id -> key of results whose time is over."""
    query = select(asset.c.id, asset.c.key).where(
        asset.c.job_id.is_not(None), asset.c.deleted_at.is_(None), asset.c.expires_at < db_now()
    )
    return {row.id: row.key for row in conn.execute(query.limit(LIMIT))}


def expired_images(conn: Connection) -> dict[str, str]:
    """Return id -> key of input images whose time is over and that no visible job refers to."""
    query = select(asset.c.id, asset.c.key).where(_is_unused_image())
    return {row.id: row.key for row in conn.execute(query.limit(LIMIT))}


def mark_images_deleted(conn: Connection, asset_ids: list[str]) -> int:
    """Remember which images are gone, but for those that were renewed meanwhile; return how many."""
    unused = update(asset).where(asset.c.id.in_(asset_ids), _is_unused_image())
    return conn.execute(unused.values(deleted_at=db_now())).rowcount


def delete_old_jobs(conn: Connection, retention: Retention = DEFAULT_RETENTION) -> int:
    """Delete jobs that ended long ago and have no object left, with all that belongs to them."""
    has_object = select(asset.c.id).where(asset.c.job_id == job.c.id, asset.c.deleted_at.is_(None))
    may_have_left_some = select(job_attempt.c.job_id).where(
        job_attempt.c.job_id == job.c.id,
        job_attempt.c.uploading_at.is_not(None),
        job_attempt.c.cleaned_at.is_(None),
        job_attempt.c.outcome != "succeeded",
    )
    old = (
        select(job.c.id)
        .where(job.c.finished_at < db_now() - db_seconds(retention.job_days * DAY_S))
        .where(job.c.state.not_in(ACTIVE), ~has_object.exists(), ~may_have_left_some.exists())
        .limit(LIMIT)
        .with_for_update(skip_locked=True)
    )
    return conn.execute(delete(job).where(job.c.id.in_(old))).rowcount


def delete_old_events(conn: Connection, retention: Retention = DEFAULT_RETENTION) -> int:
    """Delete the events of jobs that ended some time ago."""
    return conn.execute(_OLD_EVENTS, {"days": retention.event_days, "limit": LIMIT}).rowcount


def delete_empty_batches(conn: Connection, retention: Retention = DEFAULT_RETENTION) -> int:
    """Delete old batches whose members are all gone."""
    has_member = select(job.c.id).where(job.c.batch_id == batch.c.id)
    old = (
        select(batch.c.id)
        .where(batch.c.created_at < db_now() - db_seconds(retention.job_days * DAY_S), ~has_member.exists())
        .limit(LIMIT)
    )
    return conn.execute(delete(batch).where(batch.c.id.in_(old))).rowcount


def delete_old_waves(conn: Connection, retention: Retention = DEFAULT_RETENTION) -> int:
    """Delete waves as old as events whose time is over; the attempts keep their names."""
    age = db_now() - db_seconds(retention.event_days * DAY_S)
    old = select(wave.c.id).where(wave.c.formed_at < age).limit(LIMIT)
    return conn.execute(delete(wave).where(wave.c.id.in_(old))).rowcount


def delete_gone_images(conn: Connection) -> int:
    """Delete the rows of images that are gone and that no job refers to, not even a hidden one."""
    is_used = select(job.c.id).where(job.c.input_asset_id == asset.c.id)
    gone = (
        select(asset.c.id)
        .where(asset.c.kind == "input", asset.c.deleted_at.is_not(None), ~is_used.exists())
        .limit(LIMIT)
    )
    return conn.execute(delete(asset).where(asset.c.id.in_(gone))).rowcount


def _is_unused_image() -> ColumnElement[bool]:
    ends_at = func.coalesce(asset.c.expires_at, asset.c.created_at + KEEP_UNUSED)
    is_used = select(job.c.id).where(
        job.c.input_asset_id == asset.c.id,
        # A deleted job that still runs needs it too.
        or_(job.c.deleted_at.is_(None), job.c.state.in_(ACTIVE)),
    )
    return (
        (asset.c.kind == "input")
        & asset.c.deleted_at.is_(None)
        & (ends_at < db_now() - db_seconds(IMAGE_GRACE_S))
        & ~is_used.exists()
    )
