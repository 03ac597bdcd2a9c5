"""Webhook endpoints as their owners see them: made, read, changed, given new secrets, deleted.

Promises: an endpoint of another account does not exist for these functions; secrets come in sealed and go out
sealed; turning an endpoint on again keeps what was waiting; deleting one cancels what was waiting and forgets
its secrets, while its delivery log stays for a while. Rows are locked in the order endpoint, delivery, as the
sender does. Checks of URLs are the caller's business (`farm/webhooks/guard.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, delete, func, insert, or_, select, update

from farm.clock import db_after, db_now
from farm.db.tables import account, webhook_delivery, webhook_endpoint, webhook_secret
from farm.errors import FarmError, NotFoundError
from farm.ids import new_id
from farm.jobs.queries import get_job
from farm.webhooks.messages import THIN

HMAC, ED25519 = "hmac", "ed25519"
MAX_PER_ACCOUNT = 100
MAX_PER_JOB = 5
# Secrets of one kind that sign at the same time, however often they are rotated within the overlap.
MAX_ACTIVE_SECRETS = 5
OVERLAP_S = 24 * 3_600
DISABLED_BY_OWNER = "disabled by its owner"
ROOM_RETRY_AFTER_S = 60

Sealed = Mapping[str, bytes]  # kind -> ciphertext
_MEMBERS = (
    "id",
    "account_id",
    "job_id",
    "name",
    "url",
    "event_types",
    "payload_mode",
    "enabled",
    "disabled_reason",
    "max_in_flight",
    "failing_since",
    "created_at",
    "updated_at",
)


@dataclass(frozen=True)
class Secret:
    """One signing secret, sealed."""

    id: str
    endpoint_id: str
    kind: str
    ciphertext: bytes
    created_at: datetime
    retire_at: datetime | None


@dataclass(frozen=True)
class Endpoint:
    """An endpoint and the secrets that sign for it now, newest first."""

    id: str
    account_id: str
    job_id: str | None  # None: every job of the account
    name: str
    url: str
    event_types: list[str]
    payload_mode: str
    enabled: bool
    disabled_reason: str | None
    max_in_flight: int
    failing_since: datetime | None
    created_at: datetime
    updated_at: datetime
    secrets: list[Secret]

    def newest(self, kind: str) -> Secret | None:
        """Return the secret of a kind that new receivers should use."""
        return next((secret for secret in self.secrets if secret.kind == kind), None)


@dataclass(frozen=True)
class NewEndpoint:
    """What an owner says about an endpoint; everything is checked."""

    url: str
    event_types: Sequence[str]
    name: str = ""
    payload_mode: str = THIN
    max_in_flight: int = 1
    job_id: str | None = None


@dataclass(frozen=True)
class EndpointPage:
    """Endpoints, newest first, and whether more follow."""

    endpoints: list[Endpoint]
    has_more: bool


class TooManyEndpointsError(FarmError):
    """There is no room for one more endpoint."""

    def __init__(self, max_endpoints: int, whose: str) -> None:
        message = f"{whose} has {max_endpoints} webhook endpoints, which is all it may have; delete one"
        super().__init__("quota_exceeded", 429, message, retry_after_s=ROOM_RETRY_AFTER_S)


def create_endpoint(conn: Connection, account_id: str, new: NewEndpoint, sealed: Sealed) -> Endpoint:
    """Make an endpoint that hears of everything from now on.

    Raises:
        NotFoundError: The job is unknown, deleted, or of another account.
        TooManyEndpointsError: The account or the job has as many as it may have.
    """
    if new.job_id is not None:
        get_job(conn, account_id, new.job_id)
    _check_room(conn, account_id, new.job_id)
    endpoint_id = new_id("we")
    values = asdict(new) | {"id": endpoint_id, "account_id": account_id, "event_types": list(new.event_types)}
    conn.execute(insert(webhook_endpoint).values(**values))
    _add_secrets(conn, endpoint_id, sealed)
    return get_endpoint(conn, account_id, endpoint_id)


def get_endpoint(conn: Connection, account_id: str, endpoint_id: str) -> Endpoint:
    """Return an endpoint of this account.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
    """
    found = _with_secrets(conn, _visible(account_id).where(webhook_endpoint.c.id == endpoint_id))
    if not found:
        raise NotFoundError(endpoint_id)
    return found[0]


def list_endpoints(
    conn: Connection, account_id: str, *, job_id: str | None, after: str | None, limit: int
) -> EndpointPage:
    """Return a page of the endpoints of a whole account, or of one job.

    Raises:
        NotFoundError: `after` is not an endpoint of this account.
    """
    wanted = _visible(account_id).where(
        webhook_endpoint.c.job_id.is_not_distinct_from(job_id), webhook_endpoint.c.batch_id.is_(None)
    )
    if after is not None:
        get_endpoint(conn, account_id, after)
        wanted = wanted.where(webhook_endpoint.c.id < after)
    found = _with_secrets(conn, wanted.order_by(webhook_endpoint.c.id.desc()).limit(limit + 1))
    return EndpointPage(found[:limit], len(found) > limit)


def update_endpoint(
    conn: Connection,
    account_id: str,
    endpoint_id: str,
    changes: Mapping[str, Any],
    *,
    ed25519: bytes | None = None,
    drops_ed25519: bool = False,
) -> Endpoint:
    """Change members of an endpoint; one that is turned on again sends what was waiting at once.

    Args:
        conn: The caller's transaction.
        account_id: Whose endpoint it must be.
        endpoint_id: Which one.
        changes: New values of `name`, `url`, `event_types`, `payload_mode`, `max_in_flight`, `enabled`.
        ed25519: A sealed key, used if the endpoint has none.
        drops_ed25519: Stop signing with such a key.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
    """
    before = _lock(conn, account_id, endpoint_id)
    values = {name: value for name, value in changes.items() if getattr(before, name) != value}
    has_key = before.newest(ED25519) is not None
    if drops_ed25519 and has_key:
        _drop_secrets(conn, endpoint_id, ED25519)
    if ed25519 is not None and not has_key:
        _add_secrets(conn, endpoint_id, {ED25519: ed25519})
    is_key_changed = (ed25519 is not None and not has_key) or (drops_ed25519 and has_key)
    if not values and not is_key_changed:
        return before
    if "enabled" in values:
        values["disabled_reason"] = None if values["enabled"] else DISABLED_BY_OWNER
    if values.get("enabled") or "url" in values:
        values |= {"failing_since": None, "paused_until": None}  # nothing is held against it
    this = webhook_endpoint.c.id == endpoint_id
    conn.execute(update(webhook_endpoint).where(this).values(**values, updated_at=db_now()))
    if values.get("enabled"):
        _wake(conn, endpoint_id)
    return get_endpoint(conn, account_id, endpoint_id)


def rotate_secrets(
    conn: Connection, account_id: str, endpoint_id: str, sealed: Sealed, *, overlap_s: float
) -> Endpoint:
    """Give an endpoint new secrets of the kinds that are passed and that it uses.

    Args:
        conn: The caller's transaction.
        account_id: Whose endpoint it must be.
        endpoint_id: Which one.
        sealed: New secrets by kind; HMAC is always used.
        overlap_s: How long the present ones go on signing; 0 forgets them at once.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
    """
    before = _lock(conn, account_id, endpoint_id)
    used = {HMAC, *(secret.kind for secret in before.secrets)}
    fresh = {kind: ciphertext for kind, ciphertext in sealed.items() if kind in used}
    for kind in fresh:
        if overlap_s > 0:
            _retire(conn, before, kind, overlap_s)
        else:
            _drop_secrets(conn, endpoint_id, kind)
    _add_secrets(conn, endpoint_id, fresh)
    this = webhook_endpoint.c.id == endpoint_id
    conn.execute(update(webhook_endpoint).where(this).values(updated_at=db_now()))
    return get_endpoint(conn, account_id, endpoint_id)


def delete_endpoint(conn: Connection, account_id: str, endpoint_id: str) -> None:
    """Remove an endpoint at once: what waits is canceled, what is on the wire is not repeated.

    Raises:
        NotFoundError: Unknown, deleted before, or of another account.
    """
    _lock(conn, account_id, endpoint_id)
    gone = {"enabled": False, "deleted_at": db_now(), "disabled_reason": DISABLED_BY_OWNER}
    conn.execute(update(webhook_endpoint).where(webhook_endpoint.c.id == endpoint_id).values(**gone))
    conn.execute(delete(webhook_secret).where(webhook_secret.c.endpoint_id == endpoint_id))
    waiting = (webhook_delivery.c.endpoint_id == endpoint_id) & webhook_delivery.c.status.in_(
        ["pending", "leased"]
    )
    canceled = {"status": "canceled", "lease_token": None, "lease_until": None}
    conn.execute(update(webhook_delivery).where(waiting).values(**canceled))


def public_keys(conn: Connection, account_id: str) -> list[Secret]:
    """Return the Ed25519 keys that sign for an account now, still sealed."""
    mine = _visible(account_id).with_only_columns(webhook_endpoint.c.id)
    wanted = _active_secrets().where(webhook_secret.c.endpoint_id.in_(mine), webhook_secret.c.kind == ED25519)
    return [Secret(**row) for row in conn.execute(wanted).mappings()]


def _visible(account_id: str) -> Select[Any]:
    columns = [webhook_endpoint.c[name] for name in _MEMBERS]
    mine = (webhook_endpoint.c.account_id == account_id) & webhook_endpoint.c.deleted_at.is_(None)
    return select(*columns).where(mine)


def _active_secrets() -> Select[Any]:
    is_active = or_(webhook_secret.c.retire_at.is_(None), webhook_secret.c.retire_at > db_now())
    return select(webhook_secret).where(is_active).order_by(webhook_secret.c.created_at.desc())


def _with_secrets(conn: Connection, wanted: Select[Any]) -> list[Endpoint]:
    rows = conn.execute(wanted).mappings().all()
    of_these = _active_secrets().where(webhook_secret.c.endpoint_id.in_([row["id"] for row in rows]))
    secrets = [Secret(**row) for row in conn.execute(of_these).mappings()] if rows else []
    return [
        Endpoint(**row, secrets=[secret for secret in secrets if secret.endpoint_id == row["id"]])
        for row in rows
    ]


def _lock(conn: Connection, account_id: str, endpoint_id: str) -> Endpoint:
    wanted = _visible(account_id).where(webhook_endpoint.c.id == endpoint_id)
    found = _with_secrets(conn, wanted.with_for_update(key_share=True))
    if not found:
        raise NotFoundError(endpoint_id)
    return found[0]


def _check_room(conn: Connection, account_id: str, job_id: str | None) -> None:
    """Refuse one endpoint too many; the lock makes the count exact."""
    conn.execute(select(account.c.id).where(account.c.id == account_id).with_for_update(key_share=True))
    same = (
        (webhook_endpoint.c.account_id == account_id)
        & webhook_endpoint.c.deleted_at.is_(None)
        & webhook_endpoint.c.job_id.is_not_distinct_from(job_id)
        & webhook_endpoint.c.batch_id.is_(None)
    )
    count = conn.execute(select(func.count()).select_from(webhook_endpoint).where(same)).scalar_one()
    if job_id is None and count >= MAX_PER_ACCOUNT:
        raise TooManyEndpointsError(MAX_PER_ACCOUNT, "the account")
    if job_id is not None and count >= MAX_PER_JOB:
        raise TooManyEndpointsError(MAX_PER_JOB, "the video")


def _add_secrets(conn: Connection, endpoint_id: str, sealed: Sealed) -> None:
    rows = [
        # The clock of the statement: a secret of a rotation must be newer than what it replaces.
        {"id": new_id("whs"), "endpoint_id": endpoint_id, "kind": kind, "ciphertext": ciphertext}
        for kind, ciphertext in sealed.items()
    ]
    for row in rows:
        conn.execute(insert(webhook_secret).values(**row, created_at=db_now()))


def _drop_secrets(conn: Connection, endpoint_id: str, kind: str) -> None:
    of_kind = (webhook_secret.c.endpoint_id == endpoint_id) & (webhook_secret.c.kind == kind)
    conn.execute(delete(webhook_secret).where(of_kind))


def _retire(conn: Connection, before: Endpoint, kind: str, overlap_s: float) -> None:
    """Let the secrets of a kind end after the overlap, and forget those that have ended or are too many."""
    kept = [secret.id for secret in before.secrets if secret.kind == kind][: MAX_ACTIVE_SECRETS - 1]
    of_kind = (webhook_secret.c.endpoint_id == before.id) & (webhook_secret.c.kind == kind)
    conn.execute(delete(webhook_secret).where(of_kind, webhook_secret.c.id.not_in(kept)))
    unending = of_kind & webhook_secret.c.retire_at.is_(None)
    conn.execute(update(webhook_secret).where(unending).values(retire_at=db_after(overlap_s)))


def _wake(conn: Connection, endpoint_id: str) -> None:
    """Let everything that waits be due now; one at a time goes out until the first success."""
    waiting = (webhook_delivery.c.endpoint_id == endpoint_id) & (webhook_delivery.c.status == "pending")
    later = waiting & (webhook_delivery.c.next_attempt_at > db_now())
    conn.execute(update(webhook_delivery).where(later).values(next_attempt_at=db_now()))
