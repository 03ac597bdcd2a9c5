"""What an operator has set for a profile while the farm runs: paused or not, limits, how its waves form.

`profiles.yaml` says what a profile is; these rows say how it is to be treated now. A profile without a row
runs by the defaults. A paused profile is claimed by nobody and takes no new jobs; what waits for it goes on
waiting, and what runs is finished.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, select
from sqlalchemy.dialects.postgresql import insert

from farm.clock import db_now
from farm.db.tables import profile_control
from farm.errors import InvalidFieldError

Fill = Literal["pad", "spill", "wait"]
FILLS: tuple[Fill, ...] = ("pad", "spill", "wait")


@dataclass(frozen=True)
class Control:
    """The settings of one profile; `wave_size` None means all slots of its layout."""

    profile: str
    paused: bool = False
    paused_reason: str | None = None
    max_queued: int | None = None
    wave_size: int | None = None
    wave_max_wait_s: int = 60
    wave_fill: Fill = "pad"
    changed_at: datetime | None = None
    changed_by: str | None = None


def get_control(conn: Connection, profile: str) -> Control:
    """Return the settings of a profile, the defaults where nobody has set any."""
    row = conn.execute(select(profile_control).where(profile_control.c.profile == profile)).mappings()
    found = row.one_or_none()
    return Control(profile) if found is None else Control(**found)


def list_controls(conn: Connection) -> dict[str, Control]:
    """Return the profiles for which somebody has set something."""
    rows = conn.execute(select(profile_control).order_by(profile_control.c.profile)).mappings()
    return {row["profile"]: Control(**row) for row in rows}


def paused_profiles(conn: Connection) -> set[str]:
    """Return the names of the profiles that are paused."""
    return set(conn.execute(select(profile_control.c.profile).where(profile_control.c.paused)).scalars())


def pause_profile(conn: Connection, profile: str, by: str, reason: str | None = None) -> Control:
    """Let nobody claim jobs of a profile, and take no more; the caller has checked that it exists."""
    return _write(conn, profile, by, {"paused": True, "paused_reason": reason})


def resume_profile(conn: Connection, profile: str, by: str) -> Control:
    """Let its jobs be claimed and submitted again."""
    return _write(conn, profile, by, {"paused": False, "paused_reason": None})


def set_waves(
    conn: Connection, profile: str, by: str, *, size: int | None, max_wait_s: int, fill: Fill
) -> Control:
    """Say how waves of a profile form.

    Raises:
        InvalidFieldError: A value is not allowed; the message says which.
    """
    if size is not None and size < 1:
        raise InvalidFieldError("wave_size", f"wave_size is {size}; it must be at least 1, or left out")
    if max_wait_s < 0:
        raise InvalidFieldError(
            "wave_max_wait_s", f"wave_max_wait_s is {max_wait_s}; it must not be negative"
        )
    if fill not in FILLS:
        raise InvalidFieldError("wave_fill", f"wave_fill is {fill!r}; it must be one of {', '.join(FILLS)}")
    values = {"wave_size": size, "wave_max_wait_s": max_wait_s, "wave_fill": fill}
    return _write(conn, profile, by, values)


def set_max_queued(conn: Connection, profile: str, by: str, max_queued: int | None) -> Control:
    """Limit how many jobs may wait for a profile; None lifts the limit.

    Raises:
        InvalidFieldError: It is negative.
    """
    if max_queued is not None and max_queued < 0:
        raise InvalidFieldError("max_queued", f"max_queued is {max_queued}; it must not be negative")
    return _write(conn, profile, by, {"max_queued": max_queued})


def _write(conn: Connection, profile: str, by: str, values: Mapping[str, Any]) -> Control:
    changes = {**values, "changed_at": db_now(), "changed_by": by}
    row = insert(profile_control).values(profile=profile, **changes)
    written = row.on_conflict_do_update(index_elements=["profile"], set_=changes).returning(profile_control)
    return replace(Control(profile), **conn.execute(written).mappings().one())
