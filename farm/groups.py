"""Worker groups: their rows, heartbeats, what operators want of them, and which profiles are live.

A wish is one word in the group's row, which its agent reads with every heartbeat. `paused` and no wish are
states that last; `draining` and `leaving` end the agent, the second without waiting for its job, and the
group stays away until they are taken back, however often its process is started anew. `changing` ends it like
`draining`, and its process then serves `wanted_profile` on the same devices, as another group. `restarting`
is done once, between two jobs, and then forgotten. Leases of jobs are in `farm/jobs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select, update
from sqlalchemy.dialects.postgresql import insert

from farm.clock import db_now, db_seconds
from farm.db.tables import job, profile_control, worker_group
from farm.errors import GroupGoneError, InvalidFieldError, NotFoundError
from farm.jobs.states import ACTIVE
from farm.profiles import Profiles

FRESH_S = 30.0


class Wish(StrEnum):
    """What an operator may want of a group."""

    DRAINING = "draining"  # claim nothing more, finish the jobs it holds, and leave
    LEAVING = "leaving"  # the same, but give the jobs back at once
    PAUSED = "paused"  # claim nothing more, and stay
    CHANGING = "changing"  # finish the jobs it holds, and serve another profile
    RESTARTING = "restarting"  # start its ranks anew after the jobs it holds; also ends `sick`


@dataclass(frozen=True)
class Group:
    """What an agent says about itself when it starts; the id stays the same over its restarts."""

    id: str
    host: str
    profile: str
    devices: str
    boot_id: str
    deterministic: bool | None = None
    contract_versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class HeldJob:
    """A job that a group works on."""

    id: str
    account_id: str
    state: str
    phase: str | None
    step: int
    steps: int
    progress: int
    epoch: int
    started_at: datetime | None


@dataclass(frozen=True)
class GroupStatus:
    """Everything that is known of a group; `stats` is what its agent says (`worker/health.py`)."""

    id: str
    host: str
    profile: str
    devices: str
    boot_id: str
    state: str
    wanted_state: str | None
    wanted_by: str | None
    wanted_profile: str | None
    engine_fingerprint: dict[str, Any] | None
    deterministic: bool | None
    contract_versions: list[int]
    stats: dict[str, Any]
    heartbeat_at: datetime
    started_at: datetime
    is_live: bool
    jobs: list[HeldJob]


def register(conn: Connection, group: Group) -> None:
    """Write the row of an agent that starts, as `booting`; earlier wishes for it are forgotten.

    An agent asks `is_drained` first: one that an operator has drained does not start.
    """
    values: dict[str, Any] = {
        "host": group.host,
        "profile": group.profile,
        "devices": group.devices,
        "boot_id": group.boot_id,
        "state": "booting",
        "wanted_state": None,
        "wanted_by": None,
        "wanted_profile": None,
        "engine_fingerprint": None,
        "deterministic": group.deterministic,
        "contract_versions": list(group.contract_versions),
        "stats": {},
        "heartbeat_at": db_now(),
        "started_at": db_now(),
    }
    row = insert(worker_group).values(id=group.id, **values)
    conn.execute(row.on_conflict_do_update(index_elements=[worker_group.c.id], set_=values))


def heartbeat(
    conn: Connection,
    group_id: str,
    boot_id: str,
    state: str,
    fingerprint: dict[str, Any] | None = None,
    stats: Mapping[str, Any] | None = None,
) -> str | None:
    """Record that the agent lives and in which state; return the wanted state, if an operator set one.

    Raises:
        NotFoundError: Another agent has taken this group over.
    """
    values: dict[str, Any] = {"state": state, "heartbeat_at": db_now()}
    if fingerprint is not None:
        values["engine_fingerprint"] = fingerprint
    if stats is not None:
        values["stats"] = dict(stats)
    mine = (worker_group.c.id == group_id) & (worker_group.c.boot_id == boot_id)
    changed = update(worker_group).where(mine).values(**values).returning(worker_group.c.wanted_state)
    row = conn.execute(changed).one_or_none()
    if row is None:
        raise NotFoundError(f"group {group_id} of this agent")
    wanted: str | None = row[0]
    return wanted


def live_profiles(conn: Connection) -> set[str]:
    """Return the profiles that some group serves now; if there is none, those that any group served before.

    Who is sick or about to leave serves nothing, and a paused profile is served by nobody. A farm whose only
    worker restarts must not send `auto` jobs to a profile that it never had.
    """
    rows = conn.execute(
        select(worker_group.c.profile, func.bool_or(_is_live() & _takes_jobs())).group_by(
            worker_group.c.profile
        )
    ).all()
    live = {profile for profile, is_served in rows if is_served}
    return live or {profile for profile, _ in rows}


def live_fingerprints(conn: Connection) -> dict[str, dict[str, Any] | None]:
    """Return the profiles that some group serves right now, each with an engine's own account of itself."""
    rows = conn.execute(
        select(worker_group.c.profile, worker_group.c.engine_fingerprint)
        .where(_is_live())
        .order_by(worker_group.c.started_at)
    ).all()
    return {row.profile: row.engine_fingerprint for row in rows}


def mark_gone(conn: Connection) -> int:
    """Call groups `gone` that have not been heard of for a while; their jobs come back by their leases."""
    is_silent = worker_group.c.heartbeat_at < db_now() - db_seconds(FRESH_S)
    gone = update(worker_group).where(worker_group.c.state != "gone", is_silent).values(state="gone")
    return conn.execute(gone).rowcount


def list_groups(conn: Connection, *, with_gone: bool = True) -> list[GroupStatus]:
    """Return all groups with the jobs they hold, by profile and host; those that are gone come last.

    One that is drained is not called gone: it comes back when the drain is taken back.
    """
    query = select(worker_group, _is_live().label("is_live"))
    if not with_gone:
        query = query.where((worker_group.c.state != "gone") | worker_group.c.wanted_state.in_(_DRAINED))
    rows = (
        conn.execute(
            query.order_by(worker_group.c.state == "gone", *(worker_group.c[name] for name in _ORDER))
        )
        .mappings()
        .all()
    )
    held = _held_jobs(conn, [row["id"] for row in rows])
    return [GroupStatus(**row, jobs=held.get(row["id"], [])) for row in rows]


def get_group(conn: Connection, group_id: str) -> GroupStatus:
    """Return one group.

    Raises:
        NotFoundError: There is none of this id.
    """
    query = select(worker_group, _is_live().label("is_live")).where(worker_group.c.id == group_id)
    row = conn.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"group {group_id}")
    return GroupStatus(**row, jobs=_held_jobs(conn, [group_id]).get(group_id, []))


def set_wanted_state(
    conn: Connection, group_id: str, wanted: Wish | None, by: str, *, profile: str | None = None
) -> GroupStatus:
    """Ask something of a group, or take back what was asked for; its agent hears of it within a heartbeat.

    A drain that is taken back while the group still works is forgotten; once the agent has left, the next
    one may start. Whoever calls writes the audit log. `profile` is for `changing`: see `change_profile`.

    Raises:
        NotFoundError: There is none of this id.
        GroupGoneError: Its agent has left, so nobody would hear of it.
    """
    columns = worker_group.c.state, worker_group.c.wanted_state
    found = conn.execute(
        select(*columns).where(worker_group.c.id == group_id).with_for_update()
    ).one_or_none()
    if found is None:
        raise NotFoundError(f"group {group_id}")
    is_drained = found.wanted_state in _DRAINED
    if found.state == "gone" and not (is_drained and wanted is None):
        raise GroupGoneError(group_id, is_drained=is_drained)
    row = update(worker_group).where(worker_group.c.id == group_id)
    conn.execute(row.values(wanted_state=wanted, wanted_by=by, wanted_profile=profile))
    return get_group(conn, group_id)


def is_drained(conn: Connection, group_id: str) -> bool:
    """Tell whether an operator has drained the group and has not taken that back; locks its row, if any."""
    query = select(worker_group.c.wanted_state).where(worker_group.c.id == group_id).with_for_update()
    return conn.execute(query).scalar_one_or_none() in _DRAINED


def fitting_profiles(group: GroupStatus, profiles: Profiles) -> list[str]:
    """Return the other profiles that run on exactly as many devices as the group has."""
    num_devices = _num_devices(group)
    others = (row for row in profiles.by_name.values() if row.name != group.profile)
    return [row.name for row in others if row.devices == num_devices]


def change_profile(
    conn: Connection, group_id: str, name: str, profiles: Profiles, by: str
) -> tuple[GroupStatus, GroupStatus]:
    """Ask a group to serve another profile once its jobs are done; return it before and after.

    Raises:
        NotFoundError, GroupGoneError: As for `set_wanted_state`.
        InvalidFieldError: There is no such profile, the group serves it, or it needs other devices.
    """
    before = get_group(conn, group_id)
    wanted = profiles.get(name)
    if name == before.profile:
        raise InvalidFieldError("profile", f"group {group_id} serves {name} already")
    fitting = fitting_profiles(before, profiles)
    if name not in fitting:
        raise InvalidFieldError(
            "profile",
            f"{name} runs on {wanted.devices or 'no'} devices, and group {group_id} has "
            f"{_num_devices(before) or 'none'}; {', '.join(fitting) or 'no other profile'} would fit",
        )
    return before, set_wanted_state(conn, group_id, Wish.CHANGING, by, profile=name)


def wanted_profile(conn: Connection, group_id: str, boot_id: str) -> str | None:
    """Return what the group of this agent shall serve next; None if nobody wants that, or not any more."""
    mine = (worker_group.c.id == group_id) & (worker_group.c.boot_id == boot_id)
    query = select(worker_group.c.wanted_profile).where(mine, worker_group.c.wanted_state == Wish.CHANGING)
    found: str | None = conn.execute(query).scalar_one_or_none()
    return found


def forget_wish(conn: Connection, group_id: str, boot_id: str, wish: Wish) -> None:
    """Take a wish back that was fulfilled, unless another one has replaced it; the agent's own act."""
    mine = (worker_group.c.id == group_id) & (worker_group.c.boot_id == boot_id)
    conn.execute(
        update(worker_group).where(mine, worker_group.c.wanted_state == wish).values(wanted_state=None)
    )


def _num_devices(group: GroupStatus) -> int:
    return len(group.devices.split(",")) if group.devices else 0


_DRAINED = (Wish.DRAINING, Wish.LEAVING)
_ORDER = ("profile", "host", "devices", "id")


def _is_live() -> ColumnElement[bool]:
    fresh = worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S)
    return (worker_group.c.state != "gone") & fresh


def _takes_jobs() -> ColumnElement[bool]:
    paused = select(profile_control.c.profile).where(
        profile_control.c.profile == worker_group.c.profile, profile_control.c.paused
    )
    return worker_group.c.state.not_in(("sick", "draining")) & ~paused.exists()


def _held_jobs(conn: Connection, group_ids: Sequence[str]) -> dict[str, list[HeldJob]]:
    columns = [job.c[name] for name in HeldJob.__dataclass_fields__]
    query = select(job.c.group_id, *columns).where(job.c.state.in_(ACTIVE), job.c.group_id.in_(group_ids))
    held: dict[str, list[HeldJob]] = {}
    for row in conn.execute(query.order_by(job.c.started_at, job.c.id)).mappings():
        values = dict(row)
        held.setdefault(values.pop("group_id"), []).append(HeldJob(**values))
    return held
