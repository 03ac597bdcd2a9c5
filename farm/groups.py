"""Worker groups: their rows, heartbeats and which profiles are live. Leases of jobs are in `farm/jobs`."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects.postgresql import insert

from farm.clock import db_now, db_seconds
from farm.db.tables import worker_group
from farm.errors import NotFoundError

FRESH_S = 30.0


@dataclass(frozen=True)
class Group:
    """What an agent says about itself when it starts; the id stays the same over its restarts."""

    id: str
    host: str
    profile: str
    devices: str
    boot_id: str


def register(conn: Connection, group: Group) -> None:
    """Write the row of an agent that starts, as `booting`; earlier wishes for it are forgotten."""
    values = {
        "host": group.host,
        "profile": group.profile,
        "devices": group.devices,
        "boot_id": group.boot_id,
        "state": "booting",
        "wanted_state": None,
        "engine_fingerprint": None,
        "heartbeat_at": db_now(),
        "started_at": db_now(),
    }
    row = insert(worker_group).values(id=group.id, **values)
    conn.execute(row.on_conflict_do_update(index_elements=[worker_group.c.id], set_=values))


def heartbeat(
    conn: Connection, group_id: str, boot_id: str, state: str, fingerprint: dict[str, Any] | None = None
) -> str | None:
    """Record that the agent lives and in which state; return the wanted state, if an operator set one.

    Raises:
        NotFoundError: Another agent has taken this group over.
    """
    values: dict[str, Any] = {"state": state, "heartbeat_at": db_now()}
    if fingerprint is not None:
        values["engine_fingerprint"] = fingerprint
    mine = (worker_group.c.id == group_id) & (worker_group.c.boot_id == boot_id)
    changed = update(worker_group).where(mine).values(**values).returning(worker_group.c.wanted_state)
    row = conn.execute(changed).one_or_none()
    if row is None:
        raise NotFoundError(f"group {group_id} of this agent")
    wanted: str | None = row[0]
    return wanted


def live_profiles(conn: Connection) -> set[str]:
    """Return the profiles that some group serves now; if there is none, those that any group served before.

    A farm whose only worker restarts must not send `auto` jobs to a profile that it never had.
    """
    is_live = (worker_group.c.state != "gone") & (
        worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S)
    )
    rows = conn.execute(
        select(worker_group.c.profile, func.bool_or(is_live)).group_by(worker_group.c.profile)
    ).all()
    live = {profile for profile, is_served in rows if is_served}
    return live or {profile for profile, _ in rows}


def live_fingerprints(conn: Connection) -> dict[str, dict[str, Any] | None]:
    """Return the profiles that some group serves right now, each with an engine's own account of itself."""
    is_live = worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S)
    rows = conn.execute(
        select(worker_group.c.profile, worker_group.c.engine_fingerprint)
        .where(worker_group.c.state != "gone", is_live)
        .order_by(worker_group.c.started_at)
    ).all()
    return {row.profile: row.engine_fingerprint for row in rows}


def mark_gone(conn: Connection) -> int:
    """Call groups `gone` that have not been heard of for a while; their jobs come back by their leases."""
    is_silent = worker_group.c.heartbeat_at < db_now() - db_seconds(FRESH_S)
    gone = update(worker_group).where(worker_group.c.state != "gone", is_silent).values(state="gone")
    return conn.execute(gone).rowcount
