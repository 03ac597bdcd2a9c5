"""Sessions of the dashboard: who a cookie belongs to, and the token that changes must carry.

A cookie holds 32 random bytes and the table only their SHA-256, so a copy of the database opens nothing. A
session lasts eight hours from its login and takes a new id every quarter of an hour; the former id works for
one minute more, because pages load several things at once. Roles are read with each request, so a changed
or closed login is felt at once.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Connection, delete, false, insert, or_, select, update

from farm.admins import Role
from farm.clock import db_after, db_now, db_seconds
from farm.db.tables import admin_session, admin_user

LIFE_S = 8 * 3600.0
ROTATE_AFTER_S = 900.0
OVERLAP_S = 60.0
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class Session:
    """An open session; `is_due` asks for a new id."""

    id: bytes = field(repr=False)
    admin_id: str
    name: str
    role: Role
    csrf: str = field(repr=False)
    is_due: bool

    def is_csrf(self, given: str) -> bool:
        """Tell whether a form carries this session's token."""
        return hmac.compare_digest(self.csrf.encode(), given.encode())


def open_session(conn: Connection, admin_id: str) -> str:
    """Open a session after a login, remove those that are over, and return the text of the cookie."""
    conn.execute(delete(admin_session).where(admin_session.c.expires_at <= db_now()))
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    values = {
        "id": _digest(token),
        "admin_id": admin_id,
        "csrf": secrets.token_urlsafe(_TOKEN_BYTES),
        "expires_at": db_after(LIFE_S),
    }
    conn.execute(insert(admin_session).values(**values))
    return token


def find_session(conn: Connection, token: str) -> Session | None:
    """Return the open session of a cookie; None when there is none."""
    digest = _digest(token)
    is_former = (admin_session.c.former_id == digest) & (
        admin_session.c.rotated_at > db_now() - db_seconds(OVERLAP_S)
    )
    is_due = (admin_session.c.id == digest) & (
        admin_session.c.rotated_at <= db_now() - db_seconds(ROTATE_AFTER_S)
    )
    return _find(conn, or_(admin_session.c.id == digest, is_former), is_due)


def refresh(conn: Connection, session: Session) -> Session | None:
    """Return a session as it is now, whatever id it has taken since; None when it is over."""
    return _find(conn, admin_session.c.csrf == session.csrf, false())


def _find(conn: Connection, wanted: ColumnElement[bool], is_due: ColumnElement[bool]) -> Session | None:
    query = (
        select(
            admin_session.c.id,
            admin_session.c.admin_id,
            admin_user.c.name,
            admin_user.c.role,
            admin_session.c.csrf,
            is_due.label("is_due"),
        )
        .join_from(admin_session, admin_user)
        .where(wanted)
        .where(admin_session.c.expires_at > db_now(), admin_user.c.disabled_at.is_(None))
    )
    row = conn.execute(query).mappings().one_or_none()
    return None if row is None else Session(**{**row, "role": Role(row["role"])})


def rotate(conn: Connection, session: Session) -> str | None:
    """Give a session that is due a new id and return the cookie; None when another request did."""
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    values = {"id": _digest(token), "former_id": session.id, "rotated_at": db_now()}
    changed = update(admin_session).where(admin_session.c.id == session.id).values(**values)
    return token if conn.execute(changed).rowcount else None


def close_session(conn: Connection, session: Session) -> None:
    """End a session at once."""
    conn.execute(delete(admin_session).where(admin_session.c.id == session.id))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
