"""API keys as their account manages them: listed, made, rotated, revoked.

Nobody can make a key that may do more than the one that asks: no scope that it lacks, no address outside its
networks, no life beyond its own. A rotation keeps what the old key may do and lets it live on for a while.
The text of a key exists only in what `create` and `rotate` return. Each change writes the
audit log in its own transaction, in the name of the key that asked.
"""

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import SecretStr
from sqlalchemy import Connection, func, select, update

from farm import audit
from farm.accounts import NewKey, Principal, create_key, revoke_key
from farm.clock import db_now
from farm.db.tables import api_key
from farm.errors import FarmError, InvalidFieldError, NotFoundError, ScopeError
from magi2.values import shown

MAX_KEYS = 100
_COLUMNS = (
    api_key.c.id8,
    api_key.c.name,
    api_key.c.env,
    api_key.c.last4,
    api_key.c.scopes,
    api_key.c.cidrs,
    api_key.c.created_at,
    api_key.c.expires_at,
    api_key.c.revoked_at,
    api_key.c.last_used_at,
)


@dataclass(frozen=True)
class Key:
    """What may be shown of a key."""

    id8: str
    name: str
    env: str
    last4: str
    scopes: list[str]
    cidrs: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


@dataclass(frozen=True)
class KeyWish:
    """What a new key should be; no scopes means those of whoever asks, no networks likewise."""

    name: str = ""
    scopes: Sequence[str] | None = None
    cidrs: Sequence[str] | None = None
    expires_at: datetime | None = None


def list_keys(conn: Connection, account_id: str) -> list[Key]:
    """Return all keys of an account, newest first."""
    rows = conn.execute(
        select(*_COLUMNS)
        .where(api_key.c.account_id == account_id)
        .order_by(api_key.c.created_at.desc(), api_key.c.id8)
    )
    return [Key(**row) for row in rows.mappings()]


def create(
    conn: Connection,
    principal: Principal,
    pepper: SecretStr,
    wish: KeyWish,
    *,
    env: str,
    ip: str | None = None,
) -> tuple[Key, NewKey]:
    """Make a key.

    Raises:
        ScopeError: It would have a scope that the asking key lacks.
        InvalidFieldError: Unknown scopes, networks that are none or reach further, an end after the own one.
        FarmError: The account has as many open keys as it may have.
    """
    asking = _asking(conn, principal)
    scopes = sorted(principal.scopes) if wish.scopes is None else list(dict.fromkeys(wish.scopes))
    cidrs = wish.cidrs or (asking.cidrs if asking else ())
    expires_at = wish.expires_at or (asking.expires_at if asking else None)
    _check_room(conn, principal.account_id)
    new = create_key(
        conn,
        principal.account_id,
        pepper,
        env=env,
        name=wish.name,
        scopes=scopes,
        cidrs=cidrs,
        expires_at=expires_at,
    )
    # After `create_key` has checked the words; a refusal takes the key back with the transaction.
    _refuse_more(principal, asking, scopes, cidrs, expires_at)
    made = _get(conn, principal.account_id, new.id8)
    after = _noted(principal, made)
    audit.record(conn, _actor(principal), "key.create", made.id8, None, after, ip=ip)
    return made, new


def rotate(
    conn: Connection,
    principal: Principal,
    pepper: SecretStr,
    id8: str,
    *,
    overlap_s: int,
    ip: str | None = None,
) -> tuple[Key, NewKey]:
    """Make a key that may do what an open one may, and end that one after the overlap.

    Raises:
        NotFoundError: No open key of this account has this id.
        ScopeError, InvalidFieldError: The old key may do more than the one that asks.
    """
    old = _get(conn, principal.account_id, id8, is_open=True)
    _refuse_more(principal, _asking(conn, principal), old.scopes, old.cidrs, old.expires_at)
    new = create_key(
        conn,
        principal.account_id,
        pepper,
        env=old.env,
        name=old.name,
        scopes=old.scopes,
        cidrs=old.cidrs,
        expires_at=old.expires_at,
    )
    ends_at = func.least(api_key.c.expires_at, db_now() + timedelta(seconds=overlap_s))
    conn.execute(update(api_key).where(api_key.c.id8 == id8).values(expires_at=ends_at))
    made, ending = (_get(conn, principal.account_id, which) for which in (new.id8, id8))
    before, after = _noted(principal, old), _noted(principal, ending) | {"replaced_by": made.id8}
    audit.record(conn, _actor(principal), "key.rotate", id8, before, after, ip=ip)
    after = _noted(principal, made) | {"replaces": id8}
    audit.record(conn, _actor(principal), "key.create", made.id8, None, after, ip=ip)
    return made, new


def revoke(conn: Connection, principal: Principal, id8: str, *, ip: str | None = None) -> None:
    """Close a key for ever.

    Raises:
        NotFoundError: This account has no key of this id that is not revoked yet.
    """
    if not revoke_key(conn, principal.account_id, id8):
        raise NotFoundError(f"key {shown(id8)}")
    after = _noted(principal, _get(conn, principal.account_id, id8))
    audit.record(
        conn, _actor(principal), "key.revoke", id8, after | {"open": True}, after | {"open": False}, ip=ip
    )


def _actor(principal: Principal) -> str:
    return f"key:{principal.key_id}"


def _noted(principal: Principal, key: Key) -> dict[str, Any]:
    """Return what the audit log keeps of a key."""
    return {
        "account": principal.account_id,
        "name": key.name,
        "scopes": key.scopes,
        "cidrs": key.cidrs,
        "expires_at": key.expires_at,
    }


def _asking(conn: Connection, principal: Principal) -> Key | None:
    """Return the key that asks; None where the farm runs without keys."""
    query = select(*_COLUMNS).where(
        api_key.c.id8 == principal.key_id, api_key.c.account_id == principal.account_id
    )
    row = conn.execute(query).mappings().one_or_none()
    return None if row is None else Key(**row)


def _get(conn: Connection, account_id: str, id8: str, *, is_open: bool = False) -> Key:
    query = select(*_COLUMNS).where(api_key.c.id8 == id8, api_key.c.account_id == account_id)
    if is_open:
        is_alive = api_key.c.expires_at.is_(None) | (api_key.c.expires_at > db_now())
        query = query.where(api_key.c.revoked_at.is_(None), is_alive).with_for_update()
    row = conn.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"key {shown(id8)}")
    return Key(**row)


def _refuse_more(
    principal: Principal,
    asking: Key | None,
    scopes: Collection[str],
    cidrs: Collection[str],
    expires_at: datetime | None,
) -> None:
    lacking = sorted(set(scopes) - principal.scopes)
    if lacking:
        raise ScopeError(lacking[0])
    if asking is None:
        return
    if asking.cidrs and not (cidrs and all(_is_within(cidr, asking.cidrs) for cidr in cidrs)):
        raise InvalidFieldError("cidrs", f"cidrs must lie within your key's: {', '.join(asking.cidrs)}")
    if asking.expires_at is not None and (expires_at is None or expires_at > asking.expires_at):
        raise InvalidFieldError("expires_at", "expires_at must not be after the end of your own key")


def _is_within(cidr: str, outer: Collection[str]) -> bool:
    inner = ipaddress.ip_network(cidr)
    for text in outer:
        network = ipaddress.ip_network(text)
        # Networks of different versions cannot be compared.
        if network.version == inner.version and inner.subnet_of(network):  # type: ignore[arg-type] # same version
            return True
    return False


def _check_room(conn: Connection, account_id: str) -> None:
    is_open = api_key.c.revoked_at.is_(None) & (
        api_key.c.expires_at.is_(None) | (api_key.c.expires_at > db_now())
    )
    mine = select(func.count()).where(api_key.c.account_id == account_id, is_open)
    if conn.execute(mine).scalar_one() >= MAX_KEYS:
        message = f"the account has {MAX_KEYS} open keys, which is all it may have; revoke one"
        raise FarmError("quota_exceeded", 429, message, retry_after_s=60)
