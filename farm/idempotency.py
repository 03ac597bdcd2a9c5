"""Answers that are given once: the rows behind `Idempotency-Key`.

`begin` is the first statement of the transaction that does the work, and `finish` its last: so a row exists
exactly when the work was committed, and there is no mark of work in progress that a crash could leave behind.
A twin that comes meanwhile waits on the unique key, for as long as the connection's lock time-out, and then
finds the stored answer. What is stored is sealed by the caller, since an answer may hold a secret.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import OperationalError

from farm.clock import db_now
from farm.db.tables import idempotency_key
from farm.errors import FarmError

KEEP = timedelta(hours=24)
PURGE_LIMIT = 200
_LOCK_NOT_AVAILABLE = "55P03"


class KeyReusedError(FarmError):
    """The key came before, with another request."""

    def __init__(self) -> None:
        message = "this Idempotency-Key was used for another request; use a new key for a new request"
        super().__init__("idempotency_key_reused", 422, message)


class InProgressError(FarmError):
    """The first request with this key is still being answered."""

    def __init__(self) -> None:
        message = "a request with this Idempotency-Key is being answered; repeat it in a moment"
        super().__init__("idempotency_in_progress", 409, message, retry_after_s=1)


@dataclass(frozen=True)
class Scope:
    """A key where it counts: one account, one method and route; and what was asked for with it."""

    account_id: str
    route: str
    key: str
    fingerprint: bytes


@dataclass(frozen=True)
class Stored:
    """What the first request was answered."""

    status: int
    answer: bytes
    job_id: str | None


def fingerprint(route: str, path: str, members: Any, digests: Sequence[str] = ()) -> bytes:
    """Digest a parsed request: order and spelling of its members do not matter, nor do boundaries."""
    canonical = [route, path, _canonical(members), sorted(digests)]
    return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).digest()


def find(conn: Connection, scope: Scope) -> Stored | None:
    """Return the stored answer, if there is a fresh one.

    Raises:
        KeyReusedError: The key came with another request.
    """
    row = conn.execute(
        select(idempotency_key).where(_is(scope), idempotency_key.c.created_at > func.now() - KEEP)
    ).one_or_none()
    return None if row is None else _stored(row, scope)


def begin(conn: Connection, scope: Scope) -> Stored | None:
    """Take the key for this transaction, as its first statement; return the answer if somebody had it.

    Raises:
        KeyReusedError: The key came with another request.
        InProgressError: Another transaction holds it for too long.
    """
    row = insert(idempotency_key).values(
        account_id=scope.account_id, route=scope.route, key=scope.key, fingerprint=scope.fingerprint
    )
    # What is older than a day counts as not there, whether or not the sweep has been.
    nothing: dict[str, Any] = {"status": None, "answer": None, "job_id": None}
    fresh = {"fingerprint": row.excluded.fingerprint, "created_at": func.now(), **nothing}
    row = row.on_conflict_do_update(
        index_elements=[column.name for column in idempotency_key.primary_key],
        set_=fresh,
        where=idempotency_key.c.created_at <= func.now() - KEEP,
    )
    try:
        is_ours = conn.execute(row.returning(idempotency_key.c.key)).one_or_none() is not None
    except OperationalError as exc:
        if getattr(exc.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
            raise InProgressError from exc
        raise
    return None if is_ours else find(conn, scope)


def finish(conn: Connection, scope: Scope, status: int, answer: bytes, job_id: str | None) -> None:
    """Store the answer in the transaction that began with `begin`; only a 2xx may be kept."""
    if not 200 <= status < 300:
        raise ValueError(f"an answer with status {status} must not be repeated")
    values = {"status": status, "answer": answer, "job_id": job_id}
    conn.execute(update(idempotency_key).where(_is(scope)).values(**values))


def purge(conn: Connection, *, limit: int = PURGE_LIMIT) -> int:
    """Forget answers that are older than a day; return how many."""
    old = (
        select(idempotency_key.c.account_id, idempotency_key.c.route, idempotency_key.c.key)
        .where(idempotency_key.c.created_at < db_now() - KEEP)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .cte("old")
    )
    gone = delete(idempotency_key).where(
        idempotency_key.c.account_id == old.c.account_id,
        idempotency_key.c.route == old.c.route,
        idempotency_key.c.key == old.c.key,
    )
    return conn.execute(gone).rowcount


def _is(scope: Scope) -> Any:
    return (
        (idempotency_key.c.account_id == scope.account_id)
        & (idempotency_key.c.route == scope.route)
        & (idempotency_key.c.key == scope.key)
    )


def _stored(row: Row[Any], scope: Scope) -> Stored:
    if bytes(row.fingerprint) != scope.fingerprint:
        raise KeyReusedError
    return Stored(row.status, bytes(row.answer), row.job_id)


def _canonical(value: Any) -> Any:
    """Spell numbers, booleans and JSON texts of objects as one: a form sends all of them as text."""
    if isinstance(value, dict):
        return {str(name): _canonical(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(inner) for inner in value]
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return _canonical(parsed) if isinstance(parsed, dict) else value
    return value if isinstance(value, str) or value is None else json.dumps(value, default=str)
