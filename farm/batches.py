"""Batches: jobs that were submitted together, how they are doing, and the one message at their end.

The row counts the members that have ended, in the transaction of each member's end; everything else is
counted when it is asked for. Rows are locked in the order job, account_usage, batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from farm.db.tables import batch, job
from farm.errors import NotFoundError
from farm.ids import new_id
from farm.jobs.states import TERMINAL, State, openai_status
from farm.webhooks.messages import write_batch_message

STATUSES = ("queued", "in_progress", "completed", "failed")


@dataclass(frozen=True)
class Batch:
    """A batch, as its row was when it was read."""

    id: str
    account_id: str
    total: int
    done: int
    metadata: dict[str, str]
    created_at: datetime
    finished_at: datetime | None


def create_batch(conn: Connection, account_id: str, total: int, metadata: Mapping[str, str]) -> Batch:
    """Make a batch for jobs that the caller submits in the same transaction."""
    values = {"id": new_id("batch"), "account_id": account_id, "total": total, "metadata": dict(metadata)}
    return Batch(**conn.execute(insert(batch).values(**values).returning(batch)).mappings().one())


def set_total(conn: Connection, batch_id: str, total: int) -> None:
    """Correct the size, in the transaction that made the batch."""
    conn.execute(update(batch).where(batch.c.id == batch_id).values(total=total))


def get_batch(conn: Connection, account_id: str, batch_id: str) -> Batch:
    """Return a batch of this account.

    Raises:
        NotFoundError: Unknown, or of another account.
    """
    mine = (batch.c.id == batch_id) & (batch.c.account_id == account_id)
    row = conn.execute(select(batch).where(mine)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(batch_id)
    return Batch(**row)


def counts_of(conn: Connection, batch_id: str) -> dict[str, int]:
    """Return how many visible members have each of OpenAI's four statuses, and their total."""
    query = (
        select(job.c.state, func.count())
        .where(job.c.batch_id == batch_id, job.c.deleted_at.is_(None))
        .group_by(job.c.state)
    )
    counts = dict.fromkeys(STATUSES, 0)
    for state, number in conn.execute(query):
        counts[openai_status(State(state))] += number
    return {**counts, "total": sum(counts.values())}


def open_members(conn: Connection, batch_id: str) -> list[str]:
    """Return the visible members that have not ended, in the order of their ids."""
    query = (
        select(job.c.id)
        .where(job.c.batch_id == batch_id, job.c.state.not_in(TERMINAL), job.c.deleted_at.is_(None))
        .order_by(job.c.id)
    )
    return list(conn.execute(query).scalars())


def count_end(conn: Connection, batch_id: str, at: datetime, change: int) -> None:
    """Count a member that has ended (+1) or was queued again (-1); tell once that all have ended."""
    counted = update(batch).where(batch.c.id == batch_id).values(done=batch.c.done + change).returning(batch)
    found = Batch(**conn.execute(counted).mappings().one())
    if found.done < found.total or found.finished_at is not None:
        return
    conn.execute(update(batch).where(batch.c.id == batch_id).values(finished_at=at))
    data: dict[str, Any] = {
        "id": batch_id,
        "object": "video.batch",
        "counts": counts_of(conn, batch_id),
        "metadata": found.metadata,
    }
    write_batch_message(conn, found.account_id, batch_id, at, data)
