"""Accounts and API keys.

A key is `mk_{env}_{id8}_{secret32}{crc4}` in base62 and is shown once. Stored are its id, an HMAC-SHA-256 of the secret
under the server's pepper, and the last four characters. An unknown id costs the same as a wrong secret.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import SecretStr
from sqlalchemy import Connection

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


@dataclass(frozen=True)
class NewKey:
    """A key at the only moment when its text exists."""

    text: str
    env: str
    id8: str
    secret: str


@dataclass(frozen=True)
class Principal:
    """Who is calling."""

    account_id: str
    key_id: str
    scopes: frozenset[str]


def make_key(env: str) -> NewKey:
    """Draw a new key."""
    ...


def parse_key(text: str) -> NewKey | None:
    """Take a key apart; None when its form or its checksum is wrong."""
    ...


def authenticate(
    conn: Connection, text: str, pepper: SecretStr, *, client_ip: str | None = None
) -> Principal | None:
    """Return who a key belongs to; None when it is unknown, wrong, expired, revoked or of a suspended account.

    Raises:
        AddressError: The key is good, but not from this address.
    """
    ...


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
    """Make and store a key."""
    ...


def revoke_key(conn: Connection, account_id: str, id8: str) -> bool:
    """Close a key for ever; False when there is none to close."""
    ...


def ensure_account(conn: Connection, name: str, limits: dict[str, Any] | None = None) -> str:
    """Return the id of the account with this name, made if it is missing; `limits`, if given, are stored."""
    ...
