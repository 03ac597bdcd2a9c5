"""The people who may open the dashboard: names, roles and argon2id passwords.

There is no default password; the first admin is made by `magi2-farm admin create`. Ten wrong passwords in a
row lock a login for a quarter of an hour, and a login that does not exist costs as much as a wrong password.
Hashing takes a good part of a tenth of a second of one core, so it is kept out of transactions and event
loops: callers read the credentials, verify in a thread, then write what came of it.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import Connection, delete, func, insert, or_, select, update

from farm import audit
from farm.clock import db_after, db_now
from farm.db.tables import admin_session, admin_user
from farm.errors import FarmError, InvalidFieldError, NotFoundError
from farm.ids import new_id

MIN_PASSWORD_CHARS, MAX_PASSWORD_CHARS = 12, 1024
MAX_FAILURES = 10
LOCKED_S = 900.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_HASHER = PasswordHasher()  # argon2id with the library's parameters (RFC 9106, low memory)


class Role(StrEnum):
    """What somebody may do: look; run the farm; also manage accounts, keys and limits."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, other: "Role") -> bool:
        """Tell whether this role may do what the other one may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Admin:
    """One person, without what proves it."""

    id: str
    name: str
    role: Role
    created_at: datetime
    last_login_at: datetime | None
    locked_until: datetime | None
    disabled_at: datetime | None


@dataclass(frozen=True)
class Credentials:
    """What a login is checked against."""

    id: str
    password_hash: str = field(repr=False)
    is_open: bool


# Stands for a login that does not exist: verifying against it takes as long and always fails.
_NOBODY = Credentials("", _HASHER.hash(new_id("nobody")), is_open=False)
_COLUMNS = tuple(admin_user.c[name] for name in Admin.__dataclass_fields__)


class NameTakenError(FarmError):
    """Another login has this name."""

    def __init__(self, name: str) -> None:
        super().__init__("name_taken", 409, f"there is a login {name} already; use `magi2-farm admin passwd`")


def hash_password(password: str) -> str:
    """Hash a password; slow on purpose.

    Raises:
        InvalidFieldError: It is too short or too long.
    """
    if not MIN_PASSWORD_CHARS <= len(password) <= MAX_PASSWORD_CHARS:
        text = (
            f"the password has {len(password)} characters; use {MIN_PASSWORD_CHARS} to {MAX_PASSWORD_CHARS}"
        )
        raise InvalidFieldError("password", text)
    return _HASHER.hash(password)


def is_password(credentials: Credentials, password: str) -> bool:
    """Tell whether a password is the right one of a login that is open; slow on purpose."""
    if len(password) > MAX_PASSWORD_CHARS:
        return False
    try:
        is_right = _HASHER.verify(credentials.password_hash, password)
    except (VerificationError, InvalidHashError):
        return False
    return is_right and credentials.is_open


def create(conn: Connection, name: str, role: Role, password_hash: str, *, by: str) -> Admin:
    """Make a login.

    Raises:
        InvalidFieldError: The name is none.
        NameTakenError: There is one of this name.
    """
    if _NAME.fullmatch(name) is None:
        text = f"{name!r} is no name for a login; use 1 to 63 of a-z, 0-9, dot, dash and underscore"
        raise InvalidFieldError("name", text)
    if _by_name(conn, name) is not None:
        raise NameTakenError(name)
    values = {"id": new_id("admin"), "name": name, "role": role.value, "password_hash": password_hash}
    conn.execute(insert(admin_user).values(**values))
    audit.record(conn, by, "admin.create", name, None, {"role": role.value})
    return _named(conn, name)


def change_password(conn: Connection, name: str, password_hash: str, *, by: str) -> None:
    """Give a login a new password; its sessions end and a lock is lifted.

    Raises:
        NotFoundError: There is none of this name.
    """
    before = _named(conn, name)
    values = {"password_hash": password_hash, "failures": 0, "locked_until": None}
    conn.execute(update(admin_user).where(admin_user.c.id == before.id).values(**values))
    num_ended = conn.execute(delete(admin_session).where(admin_session.c.admin_id == before.id)).rowcount
    audit.record(conn, by, "admin.passwd", name, {"sessions": num_ended}, {"sessions": 0})


def change_role(conn: Connection, name: str, role: Role, *, by: str) -> Admin:
    """Let a login do more or less from its next request on.

    Raises:
        NotFoundError: There is none of this name.
    """
    before = _named(conn, name)
    conn.execute(update(admin_user).where(admin_user.c.id == before.id).values(role=role.value))
    audit.record(conn, by, "admin.role", name, {"role": before.role.value}, {"role": role.value})
    return _named(conn, name)


def set_enabled(conn: Connection, name: str, *, is_enabled: bool, by: str) -> Admin:
    """Close a login, which ends its sessions, or open it again.

    Raises:
        NotFoundError: There is none of this name.
    """
    before = _named(conn, name)
    closed = {"disabled_at": None if is_enabled else db_now()}
    conn.execute(update(admin_user).where(admin_user.c.id == before.id).values(**closed))
    if not is_enabled:
        conn.execute(delete(admin_session).where(admin_session.c.admin_id == before.id))
    was = {"enabled": before.disabled_at is None}
    audit.record(
        conn, by, "admin.enable" if is_enabled else "admin.disable", name, was, {"enabled": is_enabled}
    )
    return _named(conn, name)


def list_admins(conn: Connection) -> list[Admin]:
    """Return all logins by name."""
    return [_admin(row) for row in conn.execute(select(*_COLUMNS).order_by(admin_user.c.name)).mappings()]


def credentials_of(conn: Connection, name: str) -> Credentials:
    """Return what a login is checked against; for an unknown name, what no password fits."""
    is_open = admin_user.c.disabled_at.is_(None) & or_(
        admin_user.c.locked_until.is_(None), admin_user.c.locked_until <= db_now()
    )
    query = select(admin_user.c.id, admin_user.c.password_hash, is_open.label("is_open"))
    row = conn.execute(query.where(admin_user.c.name == name)).mappings().one_or_none()
    return _NOBODY if row is None else Credentials(**row)


def note_failure(conn: Connection, name: str, *, ip: str | None) -> None:
    """Count a wrong password; one too many locks the login for a while."""
    failures = admin_user.c.failures + 1
    is_open = or_(admin_user.c.locked_until.is_(None), admin_user.c.locked_until <= db_now())
    counted = update(admin_user).where(admin_user.c.name == name, is_open).values(failures=failures)
    row = conn.execute(counted.returning(admin_user.c.id, admin_user.c.failures)).one_or_none()
    if row is None or row.failures < MAX_FAILURES:
        return
    locked = {"failures": 0, "locked_until": db_after(LOCKED_S)}
    conn.execute(update(admin_user).where(admin_user.c.id == row.id).values(**locked))
    audit.record(conn, audit.SYSTEM, "admin.lock", name, None, {"locked_for_s": int(LOCKED_S)}, ip=ip)


def note_success(conn: Connection, admin_id: str, *, ip: str | None) -> None:
    """Forget wrong passwords and note the login."""
    values = {"failures": 0, "locked_until": None, "last_login_at": db_now()}
    changed = update(admin_user).where(admin_user.c.id == admin_id).values(**values)
    name = conn.execute(changed.returning(admin_user.c.name)).scalar_one()
    audit.record(conn, f"admin:{name}", "admin.login", name, ip=ip)


def has_admins(conn: Connection) -> bool:
    """Tell whether anybody can log in at all."""
    return bool(conn.execute(select(func.count()).select_from(admin_user)).scalar_one())


def _by_name(conn: Connection, name: str) -> Admin | None:
    row = conn.execute(select(*_COLUMNS).where(admin_user.c.name == name)).mappings().one_or_none()
    return None if row is None else _admin(row)


def _named(conn: Connection, name: str) -> Admin:
    found = _by_name(conn, name)
    if found is None:
        raise NotFoundError(f"the login {name}")
    return found


def _admin(row: object) -> Admin:
    values = dict(row)  # type: ignore[call-overload] # a row mapping
    return Admin(**{**values, "role": Role(values["role"])})
