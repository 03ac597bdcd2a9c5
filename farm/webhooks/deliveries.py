"""Rows of the webhook delivery log: take what is due, record what came of it, decide when to try again.

Promises: a delivery is leased to one sender at a time and every record of an attempt names the lease, so a
sender that comes back late changes nothing; an endpoint never has more in flight than it allows; all times
are the database's. Sends nothing itself (`worker/webhook_sender.py`).
"""

import random
import uuid
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

LEASE_S = 60
EXCERPT_CHARS = 1024
# Seconds until the next try after the 1st, 2nd, ... one: ten tries over about 75 hours.
SCHEDULE_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
MAX_ATTEMPTS = len(SCHEDULE_S) + 1
JITTER = 0.2
MAX_RETRY_AFTER_S = 3_600
DISABLE_AFTER_DAYS = 3
GONE = 410
# Answers whose Retry-After is heeded.
SLOW_DOWN = frozenset({429, 502, 503, 504})

_RECLAIM = sa.text(
    """
    UPDATE webhook_delivery
    SET status = 'pending', lease_until = NULL, lease_token = NULL, next_attempt_at = now()
    WHERE status = 'leased' AND lease_until < now()
    """
)
# NO KEY UPDATE: new deliveries of the same endpoint (which share its key) must not wait for a sender.
_LOCK_DUE_ENDPOINTS = sa.text(
    """
    SELECT e.id FROM webhook_endpoint e
    JOIN (SELECT endpoint_id, min(next_attempt_at) AS oldest_at FROM webhook_delivery
          WHERE status = 'pending' AND next_attempt_at <= now() GROUP BY endpoint_id) d
      ON d.endpoint_id = e.id
    WHERE e.enabled ORDER BY d.oldest_at, e.id LIMIT :limit FOR NO KEY UPDATE OF e SKIP LOCKED
    """
)
# A second statement, so that its snapshot is newer than the endpoint locks and the count of leases is exact.
_TAKE = sa.text(
    """
    WITH room AS (
        SELECT e.id, e.max_in_flight - (
            SELECT count(*) FROM webhook_delivery x
            WHERE x.endpoint_id = e.id AND x.status = 'leased') AS free
        FROM webhook_endpoint e WHERE e.id = ANY(:endpoints)),
    due AS (
        SELECT p.id FROM room CROSS JOIN LATERAL (
            SELECT d.id FROM webhook_delivery d
            WHERE d.endpoint_id = room.id AND d.status = 'pending' AND d.next_attempt_at <= now()
            ORDER BY d.next_attempt_at, d.id LIMIT greatest(room.free, 0) FOR UPDATE SKIP LOCKED) p
        LIMIT :limit),
    taken AS (
        UPDATE webhook_delivery d
        SET status = 'leased', attempts = d.attempts + 1, lease_token = :token,
            lease_until = now() + make_interval(secs => :lease_s)
        FROM due WHERE d.id = due.id
        RETURNING d.id, d.message_id, d.endpoint_id, d.attempts)
    SELECT t.id, t.attempts, t.endpoint_id, e.url, m.id AS message_id, m.account_id, m.type, m.job_id, m.body,
           extract(epoch FROM clock_timestamp())::bigint AS timestamp_s,
           ARRAY(SELECT s.ciphertext FROM webhook_secret s
                 WHERE s.endpoint_id = e.id AND s.kind = 'hmac'
                   AND (s.retire_at IS NULL OR s.retire_at > now())
                 ORDER BY s.created_at DESC, s.id) AS secrets
    FROM taken t JOIN webhook_endpoint e ON e.id = t.endpoint_id JOIN webhook_message m ON m.id = t.message_id
    """
)

_SETTLE = sa.text(
    """
    UPDATE webhook_delivery
    SET status = :status, lease_token = NULL, lease_until = NULL,
        last_status = :http_status, last_error = :error,
        next_attempt_at = clock_timestamp() + make_interval(secs => :delay_s)
    WHERE id = :id AND status = 'leased' AND lease_token = :token
    """
)
_LOG = sa.text(
    """
    INSERT INTO webhook_attempt
        (delivery_id, n, at, duration_ms, http_status, error, response_excerpt, resolved_ip)
    VALUES (:id, :n, clock_timestamp(), :duration_ms, :http_status, :error, :excerpt, :ip)
    """
)
_HEALTHY = sa.text(
    "UPDATE webhook_endpoint SET failing_since = NULL WHERE id = :id AND failing_since IS NOT NULL"
)
_FAILING = sa.text(
    "UPDATE webhook_endpoint SET failing_since = now() WHERE id = :id AND failing_since IS NULL"
)
_DISABLE = sa.text(
    "UPDATE webhook_endpoint SET enabled = false, disabled_reason = :reason WHERE id = :id AND enabled"
)
_DISABLE_IF_FAILING = sa.text(
    """
    UPDATE webhook_endpoint SET enabled = false, disabled_reason = :reason
    WHERE id = :id AND enabled AND failing_since < now() - make_interval(days => :days)
    """
)


@dataclass(frozen=True)
class Delivery:
    """One message that this sender holds for one endpoint, until its lease ends."""

    id: str
    attempt: int  # from 1
    endpoint_id: str
    url: str
    message_id: str
    account_id: str
    type: str
    job_id: str | None
    body: dict[str, Any]
    timestamp_s: int  # the database's second, when it was taken
    sealed_secrets: list[bytes]
    lease_token: str


@dataclass(frozen=True)
class Outcome:
    """What one attempt came to; `error` is a stable word, and nothing here holds a secret."""

    duration_ms: int
    http_status: int | None = None
    error: str | None = None
    excerpt: str | None = None
    resolved_ip: str | None = None
    retry_after_s: float | None = None

    @property
    def is_success(self) -> bool:
        """Tell whether the receiver took it."""
        return self.error is None and self.http_status is not None and 200 <= self.http_status < 300


def take_due(conn: Connection, *, limit: int) -> list[Delivery]:
    """Lease up to `limit` due deliveries, after taking back those whose sender is gone."""
    conn.execute(_RECLAIM)
    endpoints = conn.execute(_LOCK_DUE_ENDPOINTS, {"limit": limit}).scalars().all()
    if not endpoints:
        return []
    token = uuid.uuid4().hex
    values = {"endpoints": list(endpoints), "limit": limit, "token": token, "lease_s": LEASE_S}
    return [
        Delivery(
            id=row.id,
            attempt=row.attempts,
            endpoint_id=row.endpoint_id,
            url=row.url,
            message_id=row.message_id,
            account_id=row.account_id,
            type=row.type,
            job_id=row.job_id,
            body=row.body,
            timestamp_s=row.timestamp_s,
            sealed_secrets=[bytes(sealed) for sealed in row.secrets],
            lease_token=token,
        )
        for row in conn.execute(_TAKE, values)
    ]


def record(conn: Connection, delivery: Delivery, outcome: Outcome) -> bool:
    """Write what an attempt came to and when the next one is; False when the lease was lost meanwhile."""
    delay_s = next_delay_s(delivery.attempt, outcome)
    status = "ok" if outcome.is_success else "dead" if delay_s is None else "pending"
    values = {
        "id": delivery.id,
        "token": delivery.lease_token,
        "status": status,
        "http_status": outcome.http_status,
        "error": outcome.error,
        "delay_s": delay_s or 0.0,
    }
    if conn.execute(_SETTLE, values).rowcount == 0:
        return False
    log = {
        "id": delivery.id,
        "n": delivery.attempt,
        "duration_ms": outcome.duration_ms,
        "http_status": outcome.http_status,
        "error": outcome.error,
        "excerpt": outcome.excerpt,
        "ip": outcome.resolved_ip,
    }
    conn.execute(_LOG, log)
    _judge_endpoint(conn, delivery.endpoint_id, outcome)
    return True


def _judge_endpoint(conn: Connection, endpoint_id: str, outcome: Outcome) -> None:
    if outcome.is_success:
        conn.execute(_HEALTHY, {"id": endpoint_id})
        return
    conn.execute(_FAILING, {"id": endpoint_id})
    if outcome.http_status == GONE:
        conn.execute(_DISABLE, {"id": endpoint_id, "reason": "the receiver answered 410 Gone"})
        return
    reason = f"no delivery succeeded for {DISABLE_AFTER_DAYS} days"
    conn.execute(_DISABLE_IF_FAILING, {"id": endpoint_id, "reason": reason, "days": DISABLE_AFTER_DAYS})


def next_delay_s(attempt: int, outcome: Outcome) -> float | None:
    """Return the seconds until the try after `attempt`, or None when there is none.

    A receiver that asks for more time gets it (at most an hour); one that is gone is not tried again.
    """
    if outcome.is_success or outcome.http_status == GONE or attempt >= MAX_ATTEMPTS:
        return None
    spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spreads load, guards nothing
    planned_s = SCHEDULE_S[attempt - 1] * spread
    if outcome.http_status in SLOW_DOWN and outcome.retry_after_s is not None:
        return max(planned_s, min(outcome.retry_after_s, MAX_RETRY_AFTER_S))
    return planned_s
