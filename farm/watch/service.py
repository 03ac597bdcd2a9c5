"""Accounts, endpoints, storage and the use of groups, as operators see them."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Float, extract, func, select, text

from farm.clock import db_now
from farm.db.tables import account, api_key, asset, job_attempt, webhook_endpoint
from farm.errors import NotFoundError
from farm.jobs.job import Rules

_ENDPOINTS = text(
    """
    SELECT e.id, e.account_id, a.name AS account, e.job_id, e.batch_id, e.name, e.url, e.enabled,
           e.disabled_reason, e.failing_since, e.created_at,
           coalesce(s.good, 0) AS good, coalesce(s.tried, 0) AS tried,
           (SELECT count(*) FROM webhook_delivery d
            WHERE d.endpoint_id = e.id AND d.status IN ('pending', 'leased')) AS waiting,
           (SELECT count(*) FROM webhook_delivery d
            WHERE d.endpoint_id = e.id AND d.status = 'dead') AS dead
    FROM (SELECT * FROM webhook_endpoint WHERE deleted_at IS NULL
          ORDER BY (failing_since IS NULL), (job_id IS NOT NULL), id DESC LIMIT :limit) e
    JOIN account a ON a.id = e.account_id
    LEFT JOIN (
        SELECT d.endpoint_id, count(*) AS tried,
               count(*) FILTER (WHERE t.http_status BETWEEN 200 AND 299) AS good
        FROM webhook_attempt t JOIN webhook_delivery d ON d.id = t.delivery_id
        WHERE t.at > now() - interval '24 hours' GROUP BY d.endpoint_id) s ON s.endpoint_id = e.id
    ORDER BY (e.failing_since IS NULL), (e.job_id IS NOT NULL), e.id DESC
    """
)
_ACCOUNTS = text(
    """
    SELECT a.id, a.name, a.status, a.created_at, u.queued, u.running,
           CASE WHEN u.day = current_date THEN u.gpu_s_used ELSE 0 END AS gpu_s_used, u.gpu_s_reserved,
           coalesce(CAST(a.limits ->> 'max_queued' AS int), :max_queued) AS max_queued,
           coalesce(CAST(a.limits ->> 'max_running' AS int), :max_running) AS max_running,
           coalesce(CAST(a.limits ->> 'gpu_s_per_day' AS int), CAST(:gpu_s AS int)) AS gpu_s_per_day,
           (SELECT count(*) FROM api_key k WHERE k.account_id = a.id AND k.revoked_at IS NULL
            AND (k.expires_at IS NULL OR k.expires_at > now())) AS open_keys
    FROM account a JOIN account_usage u ON u.account_id = a.id
    WHERE CAST(:id AS text) IS NULL OR a.id = :id
    ORDER BY a.name LIMIT :limit
    """
)


@dataclass(frozen=True)
class EndpointRow:
    """An endpoint and how its deliveries went within a day."""

    id: str
    account_id: str
    account: str
    job_id: str | None
    batch_id: str | None
    name: str
    url: str
    enabled: bool
    disabled_reason: str | None
    failing_since: datetime | None
    created_at: datetime
    good: int
    tried: int
    waiting: int
    dead: int

    @property
    def success_rate(self) -> float | None:
        """Return the share of attempts that were taken; None without any."""
        return self.good / self.tried if self.tried else None


@dataclass(frozen=True)
class AccountRow:
    """An account, what it uses and what it may use."""

    id: str
    name: str
    status: str
    created_at: datetime
    queued: int
    running: int
    gpu_s_used: int
    gpu_s_reserved: int
    max_queued: int
    max_running: int
    gpu_s_per_day: int | None
    open_keys: int


@dataclass(frozen=True)
class Stored:
    """What an account keeps in the object store."""

    account: str
    account_id: str
    bytes: int
    objects: int
    bytes_by_kind: dict[str, int]


@dataclass(frozen=True)
class Storage:
    """What is stored, what goes soon, and what the sweeps have still to remove."""

    accounts: list[Stored]
    expiring_day: int
    expiring_week: int
    expired: int  # past its end and not removed yet
    orphans: int  # attempts whose unused objects the sweep has not removed yet
    oldest_orphan_s: float | None
    cleaned: int  # attempts whose unused objects it has removed


def endpoints(conn: Connection, limit: int = 200) -> list[EndpointRow]:
    """Return endpoints of all accounts; those that fail come first."""
    return [EndpointRow(**row) for row in conn.execute(_ENDPOINTS, {"limit": limit}).mappings()]


def owner_of_endpoint(conn: Connection, endpoint_id: str) -> str:
    """Return the account of an endpoint.

    Raises:
        NotFoundError: There is none of this id.
    """
    query = select(webhook_endpoint.c.account_id).where(webhook_endpoint.c.id == endpoint_id)
    return _one(conn, query, endpoint_id)


def owner_of_delivery(conn: Connection, delivery_id: str) -> str:
    """Return the account of a delivery.

    Raises:
        NotFoundError: There is none of this id.
    """
    query = text(
        "SELECT e.account_id FROM webhook_delivery d "
        "JOIN webhook_endpoint e ON e.id = d.endpoint_id WHERE d.id = :id"
    )
    found = conn.execute(query, {"id": delivery_id}).scalar_one_or_none()
    if found is None:
        raise NotFoundError(delivery_id)
    return str(found)


def accounts(
    conn: Connection, rules: Rules, *, account_id: str | None = None, limit: int = 500
) -> list[AccountRow]:
    """Return accounts by name, or one."""
    values = {
        "max_queued": rules.max_queued,
        "max_running": rules.max_running,
        "gpu_s": rules.gpu_s_per_day,
        "id": account_id,
        "limit": limit,
    }
    return [AccountRow(**row) for row in conn.execute(_ACCOUNTS, values).mappings()]


def get_account(conn: Connection, rules: Rules, account_id: str) -> AccountRow:
    """Return one account.

    Raises:
        NotFoundError: There is none of this id.
    """
    found = accounts(conn, rules, account_id=account_id)
    if not found:
        raise NotFoundError(account_id)
    return found[0]


def owner_of_key(conn: Connection, id8: str) -> str:
    """Return the account of a key.

    Raises:
        NotFoundError: There is none of this id.
    """
    return _one(conn, select(api_key.c.account_id).where(api_key.c.id8 == id8), f"the key {id8}")


def storage(conn: Connection) -> Storage:
    """Return what is stored."""
    kept = (
        select(account.c.name, account.c.id, asset.c.kind, func.sum(asset.c.bytes), func.count())
        .join(account, account.c.id == asset.c.account_id)
        .where(asset.c.deleted_at.is_(None))
        .group_by(account.c.name, account.c.id, asset.c.kind)
    )
    by_account: dict[str, dict[str, Any]] = {}
    for name, account_id, kind, num_bytes, objects in conn.execute(kept).all():
        found = by_account.setdefault(
            account_id,
            {"account": name, "account_id": account_id, "bytes": 0, "objects": 0, "bytes_by_kind": {}},
        )
        found["bytes"] += int(num_bytes)
        found["objects"] += objects
        found["bytes_by_kind"][kind] = int(num_bytes)
    rows = sorted((Stored(**found) for found in by_account.values()), key=lambda row: -row.bytes)
    return Storage(rows, *_going(conn), *_orphans(conn))


def _going(conn: Connection) -> tuple[int, int, int]:
    here = asset.c.deleted_at.is_(None)
    counted = select(
        func.count().filter(asset.c.expires_at.between(func.now(), func.now() + timedelta(days=1))),
        func.count().filter(asset.c.expires_at > func.now()),
        func.count().filter(asset.c.expires_at <= func.now()),
    ).where(here, asset.c.expires_at < func.now() + timedelta(days=7))
    day, week, expired = conn.execute(counted).one()
    return day, week, expired


def _orphans(conn: Connection) -> tuple[int, float | None, int]:
    is_unused = job_attempt.c.uploading_at.is_not(None) & (job_attempt.c.outcome != "succeeded")
    oldest_s = extract("epoch", db_now() - func.min(job_attempt.c.ended_at)).cast(Float)
    waiting = select(func.count(), oldest_s).where(is_unused, job_attempt.c.cleaned_at.is_(None))
    num, age_s = conn.execute(waiting).one()
    cleaned = select(func.count()).where(job_attempt.c.cleaned_at.is_not(None))
    return num, age_s, conn.execute(cleaned).scalar_one()


def busy_shares(conn: Connection) -> dict[str, float]:
    """Return the share of the last hour that each group spent on attempts."""
    hour_ago = func.now() - timedelta(hours=1)
    busy_s = extract(
        "epoch",
        func.coalesce(job_attempt.c.ended_at, func.now()) - func.greatest(job_attempt.c.started_at, hour_ago),
    )
    query = (
        select(job_attempt.c.group_id, func.sum(busy_s).cast(Float))
        .where(job_attempt.c.started_at > func.now() - timedelta(hours=6))
        .where(func.coalesce(job_attempt.c.ended_at, func.now()) > hour_ago)
        .group_by(job_attempt.c.group_id)
    )
    return {group: min(1.0, seconds / 3600) for group, seconds in conn.execute(query).all()}


def _one(conn: Connection, query: Any, what: str) -> str:
    found = conn.execute(query).scalar_one_or_none()
    if found is None:
        raise NotFoundError(what)
    return str(found)
