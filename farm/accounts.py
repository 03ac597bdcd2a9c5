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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import SecretStr
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Integer,
    Update,
    bindparam,
    case,
    extract,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert

from farm.clock import db_now, db_seconds
from farm.db.tables import account, account_usage, api_key, job
from farm.errors import (
    AddressError,
    InvalidFieldError,
    NotFoundError,
    QueueFullError,
    QuotaExceededError,
)
from farm.ids import new_id
from farm.jobs.job import Rules
from farm.jobs.states import ACTIVE, State
from magi2.values import shown

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
    was: tuple[int, ...]
    counted: tuple[int, ...]


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
    query = (
        select(
            api_key.c.account_id, api_key.c.env, api_key.c.hash, api_key.c.scopes, api_key.c.cidrs, _is_open()
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


def key_problems(scopes: Sequence[str], cidrs: Sequence[str]) -> list[tuple[str, str]]:
    """Return what is wrong with the scopes and networks of a key, each as (field, message)."""
    unknown = sorted(set(scopes) - set(SCOPES))
    words = ", ".join(map(shown, unknown))
    found = [("scopes", f"unknown scope {words}; there are {', '.join(SCOPES)}")] if unknown else []
    for cidr in cidrs:
        try:
            ipaddress.ip_network(cidr)
        except ValueError:
            found.append(("cidrs", f"{shown(cidr)} is not a network such as 10.0.0.0/8"))
    return found


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
    for field, message in key_problems(scopes, cidrs):
        raise InvalidFieldError(field, message)
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


def open_keys(conn: Connection, ids: Collection[str]) -> set[str]:
    """Return those of some keys that still open anything."""
    query = select(api_key.c.id8).join_from(api_key, account).where(api_key.c.id8.in_(ids), _is_open())
    return set(conn.execute(query).scalars())


def reserve_queue_slot(conn: Connection, account_id: str, rules: Rules, *, gpu_s: int = 0) -> None:
    """Count one more queued job and its GPU-seconds, under the lock that makes the limits exact.

    Raises:
        QueueFullError: There is no room.
        QuotaExceededError: The day's GPU-seconds do not suffice.
        NotFoundError: There is no such active account.
    """
    given = {
        "account": account_id,
        "gpu_s": gpu_s,
        "max_queued": rules.max_queued,
        "gpu_s_per_day": rules.gpu_s_per_day,
    }
    if conn.execute(_RESERVE, given).rowcount == 1:
        return
    check_room(conn, account_id, gpu_s, rules)
    # Somebody made room in between; the row is locked now.
    conn.execute(_RESERVE, given)


def check_room(conn: Connection, account_id: str, gpu_s: int, rules: Rules) -> None:
    """Lock the account's counters and refuse one job too many; job rows come first in the order of locks.

    Raises:
        QueueFullError, QuotaExceededError, NotFoundError: As for `reserve_queue_slot`.
    """
    found = usage(conn, account_id, rules, is_locked=True)
    if found is None:
        raise NotFoundError("the account")
    if found.queued >= found.max_queued:
        raise QueueFullError(found.max_queued)
    limit_s = found.gpu_s_per_day
    if limit_s is not None and gpu_s > found.gpu_s_left:
        raise QuotaExceededError(limit_s, found.gpu_s_left, gpu_s, found.day_ends_in_s)


@dataclass(frozen=True)
class Usage:
    """What an account has and may have; `gpu_s_per_day` is None without a limit."""

    queued: int
    running: int
    gpu_s_used: int
    gpu_s_reserved: int
    max_queued: int
    max_running: int
    gpu_s_per_day: int | None
    day_ends_in_s: int

    @property
    def gpu_s_left(self) -> int:
        """Return what is left of the day; 0 without a limit means nothing."""
        return max(0, (self.gpu_s_per_day or 0) - self.gpu_s_used - self.gpu_s_reserved)


def usage(conn: Connection, account_id: str, rules: Rules, *, is_locked: bool = False) -> Usage | None:
    """Return the counters of an active account beside its limits, locked if asked; None without one."""
    next_day = func.date_trunc("day", func.now()) + text("interval '1 day'")
    query = (
        select(
            account_usage.c.queued,
            account_usage.c.running,
            _gpu_s_used().label("gpu_s_used"),
            account_usage.c.gpu_s_reserved,
            _limit("max_queued", rules.max_queued).label("max_queued"),
            _limit("max_running", rules.max_running).label("max_running"),
            _limit("gpu_s_per_day", rules.gpu_s_per_day).label("gpu_s_per_day"),
            func.ceil(extract("epoch", next_day - func.now())).cast(Integer).label("day_ends_in_s"),
        )
        .join_from(account_usage, account)
        .where(account_usage.c.account_id == account_id, account.c.status == "active")
    )
    if is_locked:
        query = query.with_for_update(of=account_usage)
    row = conn.execute(query).mappings().one_or_none()
    return None if row is None else Usage(**row)


def recount(conn: Connection, account_id: str) -> Miscount | None:
    """Compare an account's counters with its jobs and mend them; None when they were right.

    Every move of a job changes the counters in its own transaction, so what is counted under the lock is
    exact.
    """
    mine = account_usage.c.account_id == account_id
    counters = (account_usage.c.queued, account_usage.c.running, account_usage.c.gpu_s_reserved)
    was = tuple(conn.execute(select(*counters).where(mine).with_for_update()).one())
    query = select(
        func.count(case((job.c.state == State.QUEUED, 1))),
        func.count(case((job.c.state.in_(ACTIVE), 1))),
        func.coalesce(func.sum(job.c.gpu_s_reserved), 0),
    ).where(job.c.account_id == account_id, job.c.state.in_([State.QUEUED, *ACTIVE]))
    counted = tuple(conn.execute(query).one())
    if was == counted:
        return None
    mended = dict(zip(("queued", "running", "gpu_s_reserved"), counted, strict=True))
    conn.execute(update(account_usage).where(mine).values(**mended))
    return Miscount(account_id, was, counted)


def account_ids(conn: Connection) -> list[str]:
    """Return all accounts, in a fixed order."""
    return list(
        conn.execute(select(account_usage.c.account_id).order_by(account_usage.c.account_id)).scalars()
    )


def _is_open() -> ColumnElement[bool]:
    return (
        api_key.c.revoked_at.is_(None)
        & or_(api_key.c.expires_at.is_(None), api_key.c.expires_at > db_now())
        & (account.c.status == "active")
    )


def _limit(name: str, default: int | BindParameter[Any] | None) -> ColumnElement[Any]:
    return func.coalesce(account.c.limits[name].as_string().cast(Integer), default)


def _gpu_s_used() -> ColumnElement[int]:
    """Return what was used today; what the row says may be of another day."""
    return case((account_usage.c.day == func.current_date(), account_usage.c.gpu_s_used), else_=0)


def _reservation() -> Update:
    """Build the statement of every submit once."""
    gpu_s = bindparam("gpu_s", type_=Integer())
    limit_s = _limit("gpu_s_per_day", bindparam("gpu_s_per_day", type_=Integer()))
    has_gpu_s = limit_s.is_(None) | (_gpu_s_used() + account_usage.c.gpu_s_reserved + gpu_s <= limit_s)
    return (
        update(account_usage)
        .where(
            account_usage.c.account_id == bindparam("account"),
            account.c.id == account_usage.c.account_id,
            account.c.status == "active",
            account_usage.c.queued < _limit("max_queued", bindparam("max_queued", type_=Integer())),
            has_gpu_s,
        )
        .values(queued=account_usage.c.queued + 1, gpu_s_reserved=account_usage.c.gpu_s_reserved + gpu_s)
    )


_RESERVE = _reservation()


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
