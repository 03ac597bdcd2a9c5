"""Accounts, their quotas and their API keys.

A key is `mk_{env}_{id8}_{secret32}{crc4}` in base62 and is shown once. Stored are its id, an HMAC-SHA-256 of
the secret under the server's pepper, and the last four characters. An unknown id costs the same as a wrong
secret. The counters of `account_usage` are kept by `farm/jobs/transition.py`; here are the limits and the
recount.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import SecretStr
from sqlalchemy import ColumnElement, Connection, Integer, case, func, insert, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from farm.clock import db_now, db_seconds
from farm.db.tables import account, account_usage, api_key, job
from farm.errors import AddressError, InvalidFieldError, NotFoundError, QueueFullError
from farm.ids import new_id
from farm.jobs.job import Rules
from farm.jobs.states import ACTIVE, State

SCOPES = (
    "videos:read",
    "videos:write",
    "videos:cancel",
    "videos:priority",
    "assets:write",
    "webhooks:manage",
    "keys:manage",
    "usage:read",
    "admin:read",
    "admin:write",
)
USER_SCOPES = tuple(scope for scope in SCOPES if not scope.startswith("admin:"))
LAST_USED_EVERY_S = 60.0
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_KEY = re.compile(r"mk_([a-z]{1,12})_([0-9A-Za-z]{8})_([0-9A-Za-z]{32})([0-9A-Za-z]{4})")
_NO_HASH = bytes(32)


@dataclass(frozen=True)
class NewKey:
    """A key at the only moment when its text exists."""

    text: str
    env: str
    id8: str
    secret: str

    def __repr__(self) -> str:
        """Show the public half only."""
        return f"NewKey(env={self.env!r}, id8={self.id8!r})"


@dataclass(frozen=True)
class Principal:
    """Who is calling."""

    account_id: str
    key_id: str
    scopes: frozenset[str]


@dataclass(frozen=True)
class Miscount:
    """Counters of an account that were not what a recount gave."""

    account_id: str
    was: tuple[int, int]
    counted: tuple[int, int]


def make_key(env: str) -> NewKey:
    """Draw a new key."""
    id8, secret = _draw(8), _draw(32)
    body = f"mk_{env}_{id8}_{secret}"
    return NewKey(body + _checksum(body), env, id8, secret)


def parse_key(key_text: str) -> NewKey | None:
    """Take a key apart; None when its form or its checksum is wrong: no database needs to be asked."""
    match = _KEY.fullmatch(key_text)
    if match is None or not hmac.compare_digest(_checksum(key_text[:-4]), match[4]):
        return None
    return NewKey(key_text, match[1], match[2], match[3])


def authenticate(
    conn: Connection, key_text: str, pepper: SecretStr, *, client_ip: str | None = None
) -> Principal | None:
    """Return who a key belongs to; None when it is unknown, wrong, over, or of a suspended account.

    Raises:
        AddressError: The key is good, but not from this address.
    """
    key = parse_key(key_text)
    if key is None:
        return None
    is_open = (
        api_key.c.revoked_at.is_(None)
        & or_(api_key.c.expires_at.is_(None), api_key.c.expires_at > db_now())
        & (account.c.status == "active")
    )
    query = (
        select(
            api_key.c.account_id, api_key.c.env, api_key.c.hash, api_key.c.scopes, api_key.c.cidrs, is_open
        )
        .join_from(api_key, account)
        .where(api_key.c.id8 == key.id8)
    )
    row = conn.execute(query).one_or_none()
    is_right = hmac.compare_digest(_digest(pepper, key.secret), row.hash if row else _NO_HASH)
    if row is None or not is_right or row.env != key.env or not row[5]:
        return None
    if row.cidrs and not _is_inside(client_ip, row.cidrs):
        raise AddressError
    _touch(conn, key.id8)
    return Principal(row.account_id, key.id8, frozenset(row.scopes))


def create_key(
    conn: Connection,
    account_id: str,
    pepper: SecretStr,
    *,
    env: str = "live",
    name: str = "",
    scopes: Sequence[str] = USER_SCOPES,
    cidrs: Sequence[str] = (),
    expires_at: datetime | None = None,
) -> NewKey:
    """Make and store a key.

    Raises:
        InvalidFieldError: A scope that does not exist, or a network that is none.
    """
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown:
        raise InvalidFieldError("scopes", f"unknown scope {unknown[0]}; there are {', '.join(SCOPES)}")
    for cidr in cidrs:
        try:
            ipaddress.ip_network(cidr)
        except ValueError:
            raise InvalidFieldError("cidrs", f"{cidr} is not a network such as 10.0.0.0/8") from None
    key = make_key(env)
    values = {
        "id8": key.id8,
        "account_id": account_id,
        "name": name,
        "env": env,
        "hash": _digest(pepper, key.secret),
        "last4": key.text[-4:],
        "scopes": list(scopes),
        "cidrs": list(cidrs),
        "expires_at": expires_at,
    }
    conn.execute(insert(api_key).values(**values))
    return key


def revoke_key(conn: Connection, account_id: str, id8: str) -> bool:
    """Close a key for ever; False when there is none to close."""
    mine = (api_key.c.id8 == id8) & (api_key.c.account_id == account_id) & api_key.c.revoked_at.is_(None)
    return conn.execute(update(api_key).where(mine).values(revoked_at=db_now())).rowcount == 1


def ensure_account(conn: Connection, name: str, limits: Mapping[str, Any] | None = None) -> str:
    """Return the id of the account with this name, made if it is missing; `limits`, if given, are stored."""
    row = upsert(account).values(id=new_id("acct"), name=name, limits=dict(limits or {}))
    changes = {"limits": row.excluded.limits} if limits is not None else {"name": row.excluded.name}
    row = row.on_conflict_do_update(index_elements=[account.c.name], set_=changes)
    account_id: str = conn.execute(row.returning(account.c.id)).scalar_one()
    usage = upsert(account_usage).values(account_id=account_id)
    conn.execute(usage.on_conflict_do_nothing())
    return account_id


def max_queued(conn: Connection, account_id: str, rules: Rules) -> int:
    """Return how many jobs of an account may wait."""
    query = select(_max_queued(rules)).where(account.c.id == account_id)
    limit: int = conn.execute(query).scalar_one()
    return limit


def reserve_queue_slot(conn: Connection, account_id: str, rules: Rules) -> None:
    """Count one more queued job of an account, under the lock that makes the limit exact.

    Raises:
        QueueFullError: There is no room.
        NotFoundError: There is no such active account.
    """
    reserved = (
        update(account_usage)
        .where(
            account_usage.c.account_id == account_id,
            account.c.id == account_id,
            account.c.status == "active",
            account_usage.c.queued < _max_queued(rules),
        )
        .values(queued=account_usage.c.queued + 1)
    )
    if conn.execute(reserved).rowcount == 1:
        return
    query = select(account.c.status).where(account.c.id == account_id)
    if conn.execute(query).scalar_one_or_none() != "active":
        raise NotFoundError("the account")
    raise QueueFullError(max_queued(conn, account_id, rules))


def recount(conn: Connection, account_id: str) -> Miscount | None:
    """Compare an account's counters with its jobs and mend them; None when they were right.

    Every move of a job changes the counters in its own transaction, so what is counted under the lock is
    exact.
    """
    mine = account_usage.c.account_id == account_id
    query = select(account_usage.c.queued, account_usage.c.running).where(mine).with_for_update()
    was = tuple(conn.execute(query).one())
    query = select(
        func.count(case((job.c.state == State.QUEUED, 1))), func.count(case((job.c.state.in_(ACTIVE), 1)))
    ).where(job.c.account_id == account_id, job.c.state.in_([State.QUEUED, *ACTIVE]))
    counted = tuple(conn.execute(query).one())
    if was == counted:
        return None
    conn.execute(update(account_usage).where(mine).values(queued=counted[0], running=counted[1]))
    return Miscount(account_id, (was[0], was[1]), (counted[0], counted[1]))


def account_ids(conn: Connection) -> list[str]:
    """Return all accounts, in a fixed order."""
    return list(
        conn.execute(select(account_usage.c.account_id).order_by(account_usage.c.account_id)).scalars()
    )


def _max_queued(rules: Rules) -> ColumnElement[int]:
    return func.coalesce(account.c.limits["max_queued"].as_string().cast(Integer), rules.max_queued)


def _touch(conn: Connection, id8: str) -> None:
    """Note the use of a key, at most once a minute and without waiting for others who do the same."""
    is_old = or_(
        api_key.c.last_used_at.is_(None), api_key.c.last_used_at < db_now() - db_seconds(LAST_USED_EVERY_S)
    )
    free = select(api_key.c.id8).where(api_key.c.id8 == id8, is_old).with_for_update(skip_locked=True)
    touched = update(api_key).where(api_key.c.id8.in_(free.scalar_subquery()))
    conn.execute(touched.values(last_used_at=db_now()))


def _is_inside(client_ip: str | None, cidrs: Sequence[str]) -> bool:
    try:
        address = ipaddress.ip_address(client_ip or "")
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(cidr) for cidr in cidrs)


def _digest(pepper: SecretStr, secret: str) -> bytes:
    return hmac.digest(pepper.get_secret_value().encode(), secret.encode(), hashlib.sha256)


def _draw(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = ""
    for _ in range(4):
        value, digit = divmod(value, 62)
        digits += _BASE62[digit]
    return digits
