"""The audit log: every change that an operator, or the farm in its own interest, makes to how it runs.

An entry says who did what to what, from where, and how that thing was before and after. It is written in the
transaction of the change itself, so neither exists without the other; the database refuses to change or
remove one. Actors are `admin:NAME`, `key:ID8` and `system` (with `system:cli` for the command line). Secrets
never get in: members that may hold one are masked here, whatever a caller passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import SecretStr
from sqlalchemy import Connection, insert, select

from farm.clock import db_now
from farm.db.tables import audit_log

SYSTEM, COMMAND_LINE = "system", "system:cli"
MASK = "********"
MAX_TEXT = 500
_SECRET_WORDS = ("password", "secret", "hash", "token", "ciphertext", "pepper")


@dataclass(frozen=True)
class Entry:
    """One change; `before` and `after` hold the members that matter, or nothing."""

    id: int
    at: datetime
    actor: str
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    ip: str | None


@dataclass(frozen=True)
class AuditQuery:
    """A page of the log, newest first; empty filters match everything."""

    actor: str | None = None
    action: str | None = None
    target: str | None = None
    before_id: int | None = None
    limit: int = 50


@dataclass(frozen=True)
class AuditPage:
    """Entries, newest first, and whether older ones follow."""

    entries: list[Entry]
    has_more: bool


def record(
    conn: Connection,
    actor: str,
    action: str,
    target: str,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    *,
    ip: str | None = None,
) -> None:
    """Write one entry in the caller's transaction.

    Args:
        conn: The transaction of the change.
        actor: Who: `admin:NAME`, `key:ID8` or `system`.
        action: What, as noun and verb: `job.cancel`.
        target: The id of what was changed.
        before: The members that the change touches, as they were; None where there was nothing.
        after: The same members afterwards; None where nothing is left.
        ip: Where the request came from, if one did.
    """
    values = {"actor": actor, "action": action, "target": target, "ip": ip}
    conn.execute(insert(audit_log).values(**values, before=_clean(before), after=_clean(after), at=db_now()))


def list_entries(conn: Connection, query: AuditQuery) -> AuditPage:
    """Return one page of the log."""
    wanted = select(audit_log)
    for name in ("actor", "action", "target"):
        value = getattr(query, name)
        if value is not None:
            wanted = wanted.where(audit_log.c[name] == value)
    if query.before_id is not None:
        wanted = wanted.where(audit_log.c.id < query.before_id)
    rows = conn.execute(wanted.order_by(audit_log.c.id.desc()).limit(query.limit + 1)).mappings().all()
    return AuditPage([Entry(**row) for row in rows[: query.limit]], len(rows) > query.limit)


def _clean(members: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what may be stored: plain JSON without secrets or long texts."""
    if members is None:
        return None
    return {name: MASK if _is_secret(name) else _plain(value) for name, value in members.items()}


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in _SECRET_WORDS)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, SecretStr | bytes):
        return MASK
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return _clean({str(name): member for name, member in value.items()})
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(member) for member in value]
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
