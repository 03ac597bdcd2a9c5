"""The delivery log: what went out to an endpoint and what came back, and sending it again.

Promises: a delivery of another account does not exist for these functions; a replay keeps the message's id
and body, starts the schedule anew and leaves the log of former attempts in place; a message is kept, and may
be replayed, for 30 days. What a receiver answered and at which address is in `Attempt` for operators;
`api/routes/webhooks.py` shows tenants neither.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Select, func, select, update

from farm.clock import db_now
from farm.db.tables import webhook_attempt, webhook_delivery, webhook_endpoint, webhook_message
from farm.errors import FarmError, InvalidFieldError, NotFoundError
from farm.webhooks.endpoints import get_endpoint
from farm.webhooks.messages import MAX_ATTEMPTS

KEPT = timedelta(days=30)
MAX_REPLAYED = 10_000


@dataclass(frozen=True)
class DeliveryRow:
    """One message for one endpoint, and how far it got."""

    id: str
    endpoint_id: str
    message_id: str
    type: str
    job_id: str | None
    status: str
    attempts: int
    max_attempts: int
    created_at: datetime
    next_attempt_at: datetime
    last_status: int | None
    last_error: str | None


@dataclass(frozen=True)
class Attempt:
    """One POST; the last two members are for operators only."""

    n: int
    at: datetime
    duration_ms: int
    http_status: int | None
    error: str | None
    response_excerpt: str | None
    resolved_ip: str | None


@dataclass(frozen=True)
class DeliveryQuery:
    """A page of an endpoint's deliveries; empty filters match everything."""

    status: str | None = None
    event_type: str | None = None
    after: str | None = None
    limit: int = 20


@dataclass(frozen=True)
class DeliveryPage:
    """Deliveries, newest first, and whether more follow."""

    deliveries: list[DeliveryRow]
    has_more: bool


class EndpointDisabledError(FarmError):
    """Nothing is sent to this endpoint now."""

    def __init__(self, endpoint_id: str, reason: str | None) -> None:
        message = f"{endpoint_id} is disabled ({reason}); set enabled to true first"
        super().__init__("endpoint_disabled", 409, message)


class MessageExpiredError(FarmError):
    """The message is too old to be sent again."""

    def __init__(self, delivery_id: str) -> None:
        message = f"the message of {delivery_id} is older than {KEPT.days} days and cannot be replayed"
        super().__init__("content_expired", 410, message)


def list_deliveries(
    conn: Connection, account_id: str, endpoint_id: str, query: DeliveryQuery
) -> DeliveryPage:
    """Return one page of an endpoint's deliveries.

    Raises:
        NotFoundError: The endpoint or the delivery that `after` names is not there.
    """
    get_endpoint(conn, account_id, endpoint_id)
    wanted = _visible(account_id).where(webhook_delivery.c.endpoint_id == endpoint_id)
    if query.after is not None:
        _get(conn, account_id, query.after)
        wanted = wanted.where(webhook_delivery.c.id < query.after)
    if query.status is not None:
        wanted = wanted.where(webhook_delivery.c.status == query.status)
    if query.event_type is not None:
        wanted = wanted.where(webhook_message.c.type == query.event_type)
    wanted = wanted.order_by(webhook_delivery.c.id.desc()).limit(query.limit + 1)
    found = [DeliveryRow(**row) for row in conn.execute(wanted).mappings()]
    return DeliveryPage(found[: query.limit], len(found) > query.limit)


def get_delivery(
    conn: Connection, account_id: str, delivery_id: str
) -> tuple[DeliveryRow, dict[str, Any], list[Attempt]]:
    """Return a delivery of this account, the body of its message without links, and all attempts.

    Raises:
        NotFoundError: Unknown, removed, or of another account.
    """
    row = _get(conn, account_id, delivery_id)
    of_message = select(webhook_message.c.body).where(webhook_message.c.id == row.message_id)
    columns = [column for column in webhook_attempt.c if column.name != "delivery_id"]
    of_delivery = select(*columns).where(webhook_attempt.c.delivery_id == delivery_id)
    attempts = conn.execute(of_delivery.order_by(webhook_attempt.c.n)).mappings()
    return row, conn.execute(of_message).scalar_one(), [Attempt(**attempt) for attempt in attempts]


def replay(conn: Connection, account_id: str, delivery_id: str) -> DeliveryRow:
    """Send a delivery again under the same message id; one that waits goes out now.

    Raises:
        NotFoundError: Unknown, removed, of another account, or its endpoint was deleted.
        EndpointDisabledError, MessageExpiredError: As their names say.
    """
    row = _get(conn, account_id, delivery_id)
    _lock_enabled(conn, account_id, row.endpoint_id)
    age = select(webhook_message.c.created_at < db_now() - KEPT).where(webhook_message.c.id == row.message_id)
    if conn.execute(age).scalar_one():
        raise MessageExpiredError(delivery_id)
    this = webhook_delivery.c.id == delivery_id
    _start_round(conn, this & webhook_delivery.c.status.in_(["ok", "dead", "canceled"]))
    waiting = this & (webhook_delivery.c.status == "pending")
    conn.execute(update(webhook_delivery).where(waiting).values(next_attempt_at=db_now()))
    return _get(conn, account_id, delivery_id)


def replay_range(
    conn: Connection,
    account_id: str,
    endpoint_id: str,
    *,
    since: datetime,
    until: datetime | None,
    only_failed: bool,
) -> int:
    """Send again what an endpoint was to be told in a stretch of time; return how many deliveries that is.

    Samples and reports of progress are left out: they were worth something at their time only.

    Raises:
        NotFoundError: The endpoint is unknown, deleted, or of another account.
        EndpointDisabledError: As its name says.
        InvalidFieldError: The range holds too many; nothing is replayed.
    """
    _lock_enabled(conn, account_id, endpoint_id)
    of_range = select(webhook_message.c.id).where(
        webhook_message.c.id == webhook_delivery.c.message_id,
        webhook_message.c.created_at >= since,
        webhook_message.c.created_at > db_now() - KEPT,
        webhook_message.c.created_at < (func.coalesce(until, db_now())),
    )
    chosen = (
        (webhook_delivery.c.endpoint_id == endpoint_id)
        & webhook_delivery.c.status.in_(["dead"] if only_failed else ["dead", "ok"])
        & (webhook_delivery.c.max_attempts - webhook_delivery.c.round_start >= MAX_ATTEMPTS)
        & of_range.exists()
    )
    count: int = conn.execute(select(func.count()).select_from(webhook_delivery).where(chosen)).scalar_one()
    if count > MAX_REPLAYED:
        text = f"the range holds {count} deliveries; at most {MAX_REPLAYED} are replayed at once: narrow it"
        raise InvalidFieldError("since", text)
    return _start_round(conn, chosen)


def purge_old(conn: Connection, *, limit: int = 200) -> int:
    """Remove the oldest messages, if they cannot be replayed any more, and endpoints deleted long ago."""
    # Ids are in order of time: a look at the oldest tells whether there is anything to do.
    oldest = select(webhook_message.c.id, webhook_message.c.created_at)
    oldest_rows = oldest.order_by(webhook_message.c.id).limit(limit).subquery()
    old = select(oldest_rows.c.id).where(oldest_rows.c.created_at < db_now() - KEPT)
    num_removed = conn.execute(sa.delete(webhook_message).where(webhook_message.c.id.in_(old))).rowcount
    gone = webhook_endpoint.c.deleted_at < db_now() - KEPT
    is_used = select(webhook_delivery.c.id).where(webhook_delivery.c.endpoint_id == webhook_endpoint.c.id)
    conn.execute(sa.delete(webhook_endpoint).where(gone, ~is_used.exists()))
    return num_removed


def _visible(account_id: str) -> Select[Any]:
    columns = [
        webhook_delivery.c.id,
        webhook_delivery.c.endpoint_id,
        webhook_delivery.c.message_id,
        webhook_message.c.type,
        webhook_message.c.job_id,
        webhook_delivery.c.status,
        webhook_delivery.c.attempts,
        webhook_delivery.c.max_attempts,
        webhook_message.c.created_at,
        webhook_delivery.c.next_attempt_at,
        webhook_delivery.c.last_status,
        webhook_delivery.c.last_error,
    ]
    of_message = webhook_message.c.id == webhook_delivery.c.message_id
    return select(*columns).where(of_message, webhook_message.c.account_id == account_id)


def _get(conn: Connection, account_id: str, delivery_id: str) -> DeliveryRow:
    wanted = _visible(account_id).where(webhook_delivery.c.id == delivery_id)
    row = conn.execute(wanted).mappings().one_or_none()
    if row is None:
        raise NotFoundError(delivery_id)
    return DeliveryRow(**row)


def _lock_enabled(conn: Connection, account_id: str, endpoint_id: str) -> None:
    wanted = select(webhook_endpoint.c.enabled, webhook_endpoint.c.disabled_reason).where(
        webhook_endpoint.c.id == endpoint_id,
        webhook_endpoint.c.account_id == account_id,
        webhook_endpoint.c.deleted_at.is_(None),
    )
    row = conn.execute(wanted.with_for_update(key_share=True)).one_or_none()
    if row is None:
        raise NotFoundError(endpoint_id)
    if not row.enabled:
        raise EndpointDisabledError(endpoint_id, row.disabled_reason)


def _start_round(conn: Connection, chosen: sa.ColumnElement[bool]) -> int:
    """Make deliveries due, with as many attempts as they had at first."""
    budget = webhook_delivery.c.max_attempts - webhook_delivery.c.round_start
    values = {
        "status": "pending",
        "round_start": webhook_delivery.c.attempts,
        "max_attempts": webhook_delivery.c.attempts + budget,
        "next_attempt_at": db_now(),
    }
    return conn.execute(update(webhook_delivery).where(chosen).values(**values)).rowcount
