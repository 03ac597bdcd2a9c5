"""Rows of the webhook delivery log: take what is due, record what came of it, decide when to try again.

Promises: a delivery is leased to one sender at a time and every record of an attempt names the lease, so a
sender that comes back late changes nothing; an endpoint never has more in flight than it allows, one that
fails has one; endpoints that have been failing for a while have places of their own, and no account takes
all places, so neither can keep a healthy endpoint waiting; all times are the database's. Rows are always
locked in the order endpoint, delivery. Sends nothing itself (`worker/webhook_sender.py`).
"""

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from farm import audit

LEASE_S = 60
EXCERPT_CHARS = 1024
# Seconds until the next try after the 1st, 2nd, ... one: ten tries over about 75 hours.
SCHEDULE_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER = 0.2
MAX_RETRY_AFTER_S = 3_600
DISABLE_AFTER_DAYS = 3
GONE = 410
# Answers whose Retry-After is heeded, and that slow the whole endpoint down.
SLOW_DOWN = frozenset({429, 502, 503, 504})
SLOW_DOWN_S = 5.0
# A receiver that has just begun to fail may come back with the next answer; later it counts as failing.
FAILING_AFTER_S = 60
FEW_DUE = 1_000  # grouping so many takes 0.4 ms; walking takes 16 us an endpoint (PostgreSQL 18, 2 cores)

_RECLAIM = sa.text(
    """
    UPDATE webhook_delivery
    SET status = 'pending', lease_until = NULL, lease_token = NULL, next_attempt_at = now()
    WHERE id IN (SELECT id FROM webhook_delivery WHERE status = 'leased' AND lease_until < now()
                 FOR UPDATE SKIP LOCKED)
    """
)
# Which endpoints have something due, and since when. A few rows are read and grouped; where one endpoint has
# a long line, the index is walked from endpoint to endpoint instead, so that its line costs nobody anything.
# Endpoints that are busy to their limit are left out here already: they must not use up the places.
_READY = sa.text(
    """
    WITH RECURSIVE few AS MATERIALIZED (
        SELECT endpoint_id, next_attempt_at FROM webhook_delivery
        WHERE status = 'pending' AND next_attempt_at <= now() LIMIT :few + 1),
    size AS (SELECT count(*) > :few AS is_long FROM few),
    walk AS (
        (SELECT endpoint_id, next_attempt_at FROM webhook_delivery
         WHERE status = 'pending' AND next_attempt_at <= now() AND (SELECT is_long FROM size)
         ORDER BY endpoint_id, next_attempt_at LIMIT 1)
        UNION ALL
        SELECT n.endpoint_id, n.next_attempt_at FROM walk CROSS JOIN LATERAL (
            SELECT d.endpoint_id, d.next_attempt_at FROM webhook_delivery d
            WHERE d.status = 'pending' AND d.next_attempt_at <= now() AND d.endpoint_id > walk.endpoint_id
            ORDER BY d.endpoint_id, d.next_attempt_at LIMIT 1) n),
    due AS (
        SELECT endpoint_id, min(next_attempt_at) AS oldest_at FROM few
        WHERE NOT (SELECT is_long FROM size) GROUP BY endpoint_id
        UNION ALL SELECT endpoint_id, next_attempt_at FROM walk),
    busy AS (
        SELECT endpoint_id, count(*) AS num FROM webhook_delivery
        WHERE status = 'leased' GROUP BY endpoint_id),
    ready AS (
        SELECT e.id, due.oldest_at,
               coalesce(e.failing_since < now() - make_interval(secs => :grace_s), false) AS is_failing
        FROM due JOIN webhook_endpoint e ON e.id = due.endpoint_id LEFT JOIN busy ON busy.endpoint_id = e.id
        WHERE e.enabled AND (e.paused_until IS NULL OR e.paused_until <= now())
          AND coalesce(busy.num, 0) < CASE WHEN e.failing_since IS NULL THEN e.max_in_flight ELSE 1 END
          AND coalesce(CAST(CAST(:load AS jsonb) ->> e.account_id AS int), 0) < :per_account),
    ranked AS (
        SELECT id, is_failing, row_number() OVER (PARTITION BY is_failing ORDER BY oldest_at, id) AS place
        FROM ready)
    SELECT id FROM ranked WHERE place <= CASE WHEN is_failing THEN :failing ELSE :healthy END
    """
)
# NO KEY UPDATE: new deliveries of the same endpoint (which share its key) must not wait for a sender.
_LOCK_READY = sa.text(
    """
    SELECT id FROM webhook_endpoint WHERE id = ANY(:ids) AND enabled
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
    """
)
# A statement of its own, so that its snapshot is newer than the endpoint locks and the count of leases is
# exact. Places are given out turn by turn, so that one endpoint with a long line takes no more than others.
# The range in place of an equality leaves the planner one index: the other one would lead it through the long
# line of somebody else.
_TAKE = sa.text(
    """
    WITH busy AS (
        SELECT endpoint_id, count(*) AS num FROM webhook_delivery
        WHERE status = 'leased' GROUP BY endpoint_id),
    room AS (
        SELECT e.id, e.account_id,
               coalesce(e.failing_since < now() - make_interval(secs => :grace_s), false) AS is_failing,
               CASE WHEN e.failing_since IS NULL THEN e.max_in_flight ELSE 1 END
               - coalesce(busy.num, 0) AS free
        FROM webhook_endpoint e LEFT JOIN busy ON busy.endpoint_id = e.id WHERE e.id = ANY(:endpoints)),
    due AS (
        SELECT p.id, p.next_attempt_at, room.account_id, room.is_failing,
               row_number() OVER (PARTITION BY room.id ORDER BY p.next_attempt_at, p.id) AS turn
        FROM room CROSS JOIN LATERAL (
            SELECT d.id, d.next_attempt_at FROM webhook_delivery d
            WHERE d.endpoint_id >= room.id AND d.endpoint_id <= room.id
              AND d.status = 'pending' AND d.next_attempt_at <= now()
            ORDER BY d.endpoint_id, d.next_attempt_at
            LIMIT greatest(room.free, 0) FOR UPDATE SKIP LOCKED) p),
    ranked AS (
        SELECT id, is_failing,
               row_number() OVER (PARTITION BY is_failing ORDER BY turn, next_attempt_at, id) AS place,
               row_number() OVER (PARTITION BY account_id ORDER BY turn, next_attempt_at, id)
               + coalesce(CAST(CAST(:load AS jsonb) ->> account_id AS int), 0) AS account_place
        FROM due),
    taken AS (
        UPDATE webhook_delivery d
        SET status = 'leased', attempts = d.attempts + 1, lease_token = :token,
            lease_until = now() + make_interval(secs => :lease_s)
        FROM ranked r WHERE d.id = r.id AND r.account_place <= :per_account
          AND r.place <= CASE WHEN r.is_failing THEN :failing ELSE :healthy END
        RETURNING d.id, d.message_id, d.endpoint_id, d.attempts, d.round_start, d.max_attempts, r.is_failing)
    SELECT t.id, t.attempts AS attempt, t.round_start, t.max_attempts, t.endpoint_id, t.is_failing,
           e.url, m.id AS message_id, m.account_id, m.type, m.job_id,
           CASE WHEN e.payload_mode = 'full' AND m.full_data IS NOT NULL
                THEN jsonb_set(m.body, '{data}', m.full_data) ELSE m.body END AS body,
           j.id IS NOT NULL AS has_job, j.traceparent, a.key AS object_key, a.media_type,
           extract(epoch FROM clock_timestamp())::bigint AS timestamp_s,
           ARRAY(SELECT s.ciphertext FROM webhook_secret s
                 WHERE s.endpoint_id = e.id AND (s.retire_at IS NULL OR s.retire_at > now())
                 ORDER BY s.kind DESC, s.created_at DESC, s.id) AS sealed_secrets
    FROM taken t JOIN webhook_endpoint e ON e.id = t.endpoint_id JOIN webhook_message m ON m.id = t.message_id
    LEFT JOIN job j ON j.id = m.job_id AND j.deleted_at IS NULL
    LEFT JOIN asset a ON a.job_id = j.id AND a.kind = 'video' AND a.deleted_at IS NULL
         AND m.type = 'video.completed'
    """
)

_LOCK_ENDPOINTS = sa.text(
    """
    SELECT id, failing_since IS NOT NULL OR paused_until IS NOT NULL AS was_slow FROM webhook_endpoint
    WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE
    """
)
_SETTLE = sa.text(
    """
    UPDATE webhook_delivery d
    SET status = r.status, lease_token = NULL, lease_until = NULL,
        last_status = r.http_status, last_error = r.error,
        next_attempt_at = clock_timestamp() + make_interval(secs => r.delay_s)
    FROM jsonb_to_recordset(CAST(:rows AS jsonb))
         AS r(id text, token text, status text, http_status int, error text, delay_s float8)
    WHERE d.id = r.id AND d.status = 'leased' AND d.lease_token = r.token RETURNING d.id
    """
)
_LOG = sa.text(
    """
    INSERT INTO webhook_attempt
        (delivery_id, n, at, duration_ms, http_status, error, response_excerpt, resolved_ip)
    VALUES (:id, :n, clock_timestamp(), :duration_ms, :http_status, :error, :excerpt, :ip)
    """
)
_HEALTHY = sa.text("UPDATE webhook_endpoint SET failing_since = NULL, paused_until = NULL WHERE id = :id")
_FAILING = sa.text(
    """
    UPDATE webhook_endpoint
    SET failing_since = coalesce(failing_since, now()),
        paused_until = CASE WHEN :pause_s > 0 THEN clock_timestamp() + make_interval(secs => :pause_s)
                       ELSE paused_until END
    WHERE id = :id
    """
)
_DISABLE = sa.text(
    """
    UPDATE webhook_endpoint SET enabled = false, disabled_reason = :reason
    WHERE id = :id AND enabled AND (:is_gone OR failing_since < now() - make_interval(days => :days))
    """
)
GONE_REASON = "the receiver answered 410 Gone"
FAILING_REASON = f"no delivery succeeded for {DISABLE_AFTER_DAYS} days"


@dataclass(frozen=True)
class Room:
    """How many deliveries a sender has places for: by health of the endpoint, and for any one account."""

    healthy: int
    failing: int
    per_account: int
    account_load: Mapping[str, int] = field(default_factory=dict)  # places that each account has now


@dataclass(frozen=True)
class Delivery:
    """One message that this sender holds for one endpoint, until its lease ends."""

    id: str
    attempt: int  # from 1, over all rounds
    round_start: int
    max_attempts: int
    endpoint_id: str
    is_failing: bool
    url: str
    message_id: str
    account_id: str
    type: str
    job_id: str | None
    has_job: bool  # the job exists and was not deleted
    traceparent: str | None
    object_key: str | None  # of the clip, while there is one
    media_type: str | None
    body: dict[str, Any]  # without links
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


@dataclass(frozen=True)
class Recorded:
    """What the records of one transaction changed."""

    kept: frozenset[str]  # ids of deliveries; of the others the lease was lost meanwhile
    disabled: Mapping[str, str]  # endpoint -> reason


Result = tuple[Delivery, Outcome]


def reclaim(conn: Connection) -> int:
    """Take deliveries back whose sender is gone, and let them be due at once; return how many."""
    return conn.execute(_RECLAIM).rowcount


def take_due(conn: Connection, room: Room, *, lease_s: float = LEASE_S) -> list[Delivery]:
    """Lease due deliveries."""
    values: dict[str, Any] = {
        "healthy": room.healthy,
        "failing": room.failing,
        "per_account": room.per_account,
        "load": json.dumps(dict(room.account_load)),
        "grace_s": FAILING_AFTER_S,
        "few": FEW_DUE,
    }
    ready = conn.execute(_READY, values).scalars().all()
    if not ready:
        return []
    values["endpoints"] = conn.execute(_LOCK_READY, {"ids": list(ready)}).scalars().all()
    values |= {"token": uuid.uuid4().hex, "lease_s": lease_s}
    return [
        Delivery(
            **{**row, "sealed_secrets": [bytes(sealed) for sealed in row["sealed_secrets"]]},
            lease_token=values["token"],
        )
        for row in conn.execute(_TAKE, values).mappings()
    ]


def record(conn: Connection, results: Sequence[Result]) -> Recorded:
    """Write what attempts came to and when the next ones are, and judge their endpoints."""
    endpoint_ids = sorted({delivery.endpoint_id for delivery, _ in results})
    locked = {row.id: row.was_slow for row in conn.execute(_LOCK_ENDPOINTS, {"ids": endpoint_ids})}
    rows = json.dumps([_settlement(delivery, outcome) for delivery, outcome in results])
    kept = frozenset(conn.execute(_SETTLE, {"rows": rows}).scalars())
    of_kept = [(delivery, outcome) for delivery, outcome in results if delivery.id in kept]
    if of_kept:
        conn.execute(_LOG, [_log_line(delivery, outcome) for delivery, outcome in of_kept])
    outcomes: dict[str, list[Outcome]] = {}
    for delivery, outcome in of_kept:
        outcomes.setdefault(delivery.endpoint_id, []).append(outcome)
    disabled = {}
    for endpoint_id in sorted(outcomes):
        reason = _judge_endpoint(conn, endpoint_id, outcomes[endpoint_id], was_slow=locked[endpoint_id])
        if reason is not None:
            disabled[endpoint_id] = reason
    return Recorded(kept, disabled)


def _settlement(delivery: Delivery, outcome: Outcome) -> dict[str, Any]:
    delay_s = next_delay_s(delivery.attempt, outcome, delivery.round_start, delivery.max_attempts)
    return {
        "id": delivery.id,
        "token": delivery.lease_token,
        "status": "ok" if outcome.is_success else "dead" if delay_s is None else "pending",
        "http_status": outcome.http_status,
        "error": outcome.error,
        "delay_s": delay_s or 0.0,
    }


def _log_line(delivery: Delivery, outcome: Outcome) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "n": delivery.attempt,
        "duration_ms": outcome.duration_ms,
        "http_status": outcome.http_status,
        "error": outcome.error,
        "excerpt": outcome.excerpt,
        "ip": outcome.resolved_ip,
    }


def _judge_endpoint(
    conn: Connection, endpoint_id: str, outcomes: Sequence[Outcome], *, was_slow: bool
) -> str | None:
    """Note success or failure; return the reason where the endpoint was disabled now."""
    if any(outcome.is_success for outcome in outcomes):
        if was_slow:
            conn.execute(_HEALTHY, {"id": endpoint_id})
        return None
    conn.execute(_FAILING, {"id": endpoint_id, "pause_s": max(map(pause_s, outcomes))})
    is_gone = any(outcome.http_status == GONE for outcome in outcomes)
    reason = GONE_REASON if is_gone else FAILING_REASON
    values = {"id": endpoint_id, "reason": reason, "is_gone": is_gone, "days": DISABLE_AFTER_DAYS}
    if not conn.execute(_DISABLE, values).rowcount:
        return None
    after = {"enabled": False, "reason": reason}
    audit.record(conn, audit.SYSTEM, "webhook.disabled", endpoint_id, {"enabled": True}, after)
    return reason


def pause_s(outcome: Outcome) -> float:
    """Return how long the whole endpoint is left alone: what a busy receiver asks for, at most an hour."""
    if outcome.http_status not in SLOW_DOWN:
        return 0.0
    return SLOW_DOWN_S if outcome.retry_after_s is None else min(outcome.retry_after_s, MAX_RETRY_AFTER_S)


def next_delay_s(attempt: int, outcome: Outcome, round_start: int, max_attempts: int) -> float | None:
    """Return the seconds until the try after `attempt`, or None when there is none.

    A receiver that asks for more time gets it (at most an hour); one that is gone is not tried again.
    """
    if outcome.is_success or outcome.http_status == GONE or attempt >= max_attempts:
        return None
    spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spreads load, guards nothing
    planned_s = SCHEDULE_S[min(attempt - round_start, len(SCHEDULE_S)) - 1] * spread
    return max(planned_s, pause_s(outcome))
