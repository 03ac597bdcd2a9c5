"""What operators set for an account: its limits, and whether its keys work at all.

A suspended account keeps everything it has: jobs that wait or run go on, but none of its keys opens anything
until it is resumed. A limit that is not set falls back to the farm's own (`FARM_QUOTA__*`).
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select, update

from farm.db.tables import account
from farm.errors import InvalidFieldError, NotFoundError

LIMITS = ("max_queued", "max_running", "gpu_s_per_day")
MAX_LIMIT = 2**31 - 1


def set_limits(
    conn: Connection, account_id: str, limits: Mapping[str, int | None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Set all limits of an account, None for the farm's own; return what they were and what they are.

    Raises:
        NotFoundError: There is no such account.
        InvalidFieldError: A limit is unknown or out of range.
    """
    for name, value in limits.items():
        if name not in LIMITS:
            raise InvalidFieldError(name, f"{name} is no limit; there are {', '.join(LIMITS)}")
        if value is not None and not 0 <= value <= MAX_LIMIT:
            raise InvalidFieldError(
                name, f"{name} is {value}; use 0 to {MAX_LIMIT}, or nothing for the farm's own"
            )
    before = dict(_locked(conn, account_id).limits)
    after = {name: value for name, value in {**before, **limits}.items() if value is not None}
    conn.execute(update(account).where(account.c.id == account_id).values(limits=after))
    return before, after


def set_suspended(conn: Connection, account_id: str, *, is_suspended: bool) -> tuple[str, str]:
    """Close or open an account; return the status that it had and the one it has.

    Raises:
        NotFoundError: There is no such account.
    """
    before: str = _locked(conn, account_id).status
    after = "suspended" if is_suspended else "active"
    conn.execute(update(account).where(account.c.id == account_id).values(status=after))
    return before, after


def _locked(conn: Connection, account_id: str) -> Any:
    query = select(account.c.status, account.c.limits).where(account.c.id == account_id)
    row = conn.execute(query.with_for_update(key_share=True)).one_or_none()
    if row is None:
        raise NotFoundError(account_id)
    return row
