"""The outbox: what must be published because something was committed.

Rows are written in the transaction that asks for them and published afterwards by whoever runs `relay_once`.
A row may be published twice, never not at all; order is not promised.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import (
    CTE,
    BindParameter,
    ColumnElement,
    Connection,
    Engine,
    Row,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from farm.clock import db_after, db_now, db_seconds
from farm.db.session import unit_of_work
from farm.db.tables import outbox

CHANNEL = "magi2_outbox"
DOORBELL = "doorbell"
BATCH = 100
LEASE_S = 30.0
KEEP_SENT_S = 3600.0
MAX_ERROR_CHARS = 500
Publish = Callable[[str, str], None]  # (job_id, profile); raises PublishError when the broker did not take it


class PublishError(Exception):
    """The broker did not take a message; the row stays and is tried again."""


def enqueue_doorbell(conn: Connection, job_id: str, profile: str) -> None:
    """Ask for a doorbell in the caller's transaction, and wake the relays at its commit."""
    row, notice = doorbell(doorbell_payload(job_id, profile))
    conn.execute(select(notice).add_cte(row))


def doorbell_payload(job_id: str, profile: str) -> dict[str, str]:
    """Return what a doorbell says."""
    return {"job_id": job_id, "profile": profile}


def doorbell(payload: dict[str, str] | BindParameter[Any]) -> tuple[CTE, ColumnElement[None]]:
    """Return the same as parts of another statement: the row to add, and what to select."""
    return insert(outbox).values(topic=DOORBELL, payload=payload).cte("doorbell"), func.pg_notify(CHANNEL, "")


def relay_once(engine: Engine, publish: Publish) -> int:
    """Publish up to 100 unsent rows, stopping at the first failure; return how many were sent.

    Rows are found by `sent_at is null`, never by their order: ids commit out of order. No transaction is open
    while `publish` runs. A kill in between sends the rows again after the lease: harmless.
    """
    with unit_of_work(engine) as conn:
        rows = _lease(conn)
    sent: list[int] = []
    error: PublishError | None = None
    for row in rows:
        try:
            publish(row.payload["job_id"], row.payload["profile"])
        except PublishError as exc:
            error = exc
            break
        sent.append(row.id)
    if rows:
        with unit_of_work(engine) as conn:
            _settle(conn, rows, sent, error)
    return len(sent)


def has_unsent(conn: Connection) -> bool:
    """Tell whether doorbells are still waiting for the broker."""
    return conn.execute(select(outbox.c.id).where(outbox.c.sent_at.is_(None)).limit(1)).first() is not None


def purge_sent(conn: Connection) -> int:
    """Remove rows that were sent more than an hour ago; return how many."""
    old = outbox.c.sent_at < db_now() - db_seconds(KEEP_SENT_S)
    return conn.execute(delete(outbox).where(old)).rowcount


def _lease(conn: Connection) -> Sequence[Row[Any]]:
    is_free = or_(outbox.c.locked_until.is_(None), outbox.c.locked_until < db_now())
    free = (
        select(outbox.c.id)
        .where(outbox.c.sent_at.is_(None), is_free)
        .order_by(outbox.c.id)
        .limit(BATCH)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    taken = update(outbox).where(outbox.c.id.in_(free)).values(locked_until=db_after(LEASE_S))
    rows = conn.execute(taken.returning(outbox.c.id, outbox.c.payload)).all()
    return sorted(rows, key=lambda row: row.id)


def _settle(
    conn: Connection, rows: Sequence[Row[Any]], sent: Sequence[int], error: PublishError | None
) -> None:
    """Mark what was sent and free the rest; the row that the broker refused keeps the reason."""
    if sent:
        conn.execute(update(outbox).where(outbox.c.id.in_(sent)).values(sent_at=db_now(), error=None))
    unsent = [row.id for row in rows[len(sent) :]]
    if unsent:
        conn.execute(update(outbox).where(outbox.c.id.in_(unsent)).values(locked_until=None))
        reason = {"attempts": outbox.c.attempts + 1, "error": str(error)[:MAX_ERROR_CHARS]}
        conn.execute(update(outbox).where(outbox.c.id == unsent[0]).values(**reason))
