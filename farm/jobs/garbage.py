"""Objects that nobody may see any more: of attempts that did not win, and of jobs that were deleted.

Objects go first and rows afterwards, so a kill in between only repeats a deletion. No transaction is open
while the store is asked. An attempt that lost its lease may still be uploading, unaware; its keys are swept
again and again for an hour, and everything that it can write lies under its own epoch.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from sqlalchemy import Connection, select, tuple_, update

from farm.clock import db_now
from farm.db.tables import asset, job, job_attempt
from farm.jobs.states import ACTIVE
from farm.storage import output_key

OUTPUT_NAMES = ("video.mp4", "thumb.jpg", "sprite.jpg", "audio.wav", "meta.json")
LIMIT = 200
ZOMBIE_LIFE = timedelta(hours=1)


class Deleter(Protocol):
    """The part of an object store that a sweep needs."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is fine."""

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Give up uploads in parts that were begun so long ago; return how many."""


@dataclass(frozen=True)
class LostAttempt:
    """An attempt that may have left objects."""

    job_id: str
    epoch: int
    keys: tuple[str, ...]
    is_over: bool  # nothing of it can still be running


def lost_attempts(conn: Connection) -> list[LostAttempt]:
    """Return attempts that reached the upload and did not win, longest ended first."""
    is_over = (job_attempt.c.error["code"].as_string().is_distinct_from("agent_lost")) | (
        job_attempt.c.ended_at < db_now() - ZOMBIE_LIFE
    )
    query = (
        select(job_attempt.c.job_id, job_attempt.c.epoch, job.c.account_id, job.c.created_at, is_over)
        .join(job, job.c.id == job_attempt.c.job_id)
        .where(job_attempt.c.uploading_at.is_not(None), job_attempt.c.cleaned_at.is_(None))
        .where(job_attempt.c.outcome != "succeeded")
        .order_by(job_attempt.c.ended_at)
        .limit(LIMIT)
    )
    return [
        LostAttempt(
            row.job_id,
            row.epoch,
            tuple(
                output_key(row.account_id, row.job_id, row.epoch, name, row.created_at)
                for name in OUTPUT_NAMES
            ),
            row[4],
        )
        for row in conn.execute(query)
    ]


def mark_cleaned(conn: Connection, attempts: list[LostAttempt]) -> None:
    """Remember which attempts need no further sweep."""
    done = [(attempt.job_id, attempt.epoch) for attempt in attempts if attempt.is_over]
    if done:
        mine = tuple_(job_attempt.c.job_id, job_attempt.c.epoch).in_(done)
        conn.execute(update(job_attempt).where(mine).values(cleaned_at=db_now()))


def deleted_assets(conn: Connection) -> dict[str, str]:
    """Return id -> key of objects whose job was deleted and has let go of them."""
    query = (
        select(asset.c.id, asset.c.key)
        .join(job, job.c.id == asset.c.job_id)
        .where(job.c.deleted_at.is_not(None), job.c.state.not_in(ACTIVE), asset.c.deleted_at.is_(None))
        .limit(LIMIT)
    )
    return {row.id: row.key for row in conn.execute(query)}


def mark_deleted(conn: Connection, asset_ids: list[str]) -> None:
    """Remember which objects are gone."""
    if asset_ids:
        conn.execute(update(asset).where(asset.c.id.in_(asset_ids)).values(deleted_at=db_now()))
