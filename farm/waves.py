"""Waves for people and for the sweep: which ones form now, which ones ran, and how they ended.

Forming itself is part of the claim (`farm/jobs/wave_claim.py`); here are the reads of it, and what an agent
records at the end of a wave.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Float, extract, func, select, update

from farm.clock import db_now
from farm.db.session import after_commit
from farm.db.tables import job, job_attempt, wave
from farm.jobs.states import State
from farm.metrics.moves import count_late_ghosts
from farm.profile_control import Control, Fill, list_controls

ALONE_AFTER = 2  # a job that was in so many crashed waves runs its next attempt alone


@dataclass(frozen=True)
class Forming:
    """Jobs that wait for a wave together; `is_due`: they have waited as long as a wave may."""

    profile: str
    wave_key: str
    num_waiting: int
    num_alone: int  # of them, those that will run without neighbours
    num_slots: int
    oldest_s: float
    max_wait_s: int
    fill: Fill

    @property
    def is_due(self) -> bool:
        """Tell whether the fill decision is due, or already made by a full wave."""
        return self.num_waiting - self.num_alone >= self.num_slots or self.oldest_s >= self.max_wait_s


@dataclass(frozen=True)
class WaveMember:
    """An attempt of a wave."""

    job_id: str
    epoch: int
    outcome: str | None


@dataclass(frozen=True)
class Wave:
    """A wave that was formed; without `ended_at` it runs, or its agent was lost."""

    id: str
    profile: str
    wave_key: str
    group_id: str
    num_slots: int
    num_members: int
    num_ghosts: int
    fill: str
    waited_s: int
    formed_at: datetime
    ended_at: datetime | None
    outcome: str | None
    members: list[WaveMember]


def forming_waves(conn: Connection, wave_sizes: Mapping[str, int]) -> list[Forming]:
    """Return what waits for waves now, by profile and key.

    Args:
        conn: Any connection.
        wave_sizes: Slots of the profiles whose layout has more than one (`Profiles.wave_sizes`).
    """
    since = func.greatest(job.c.queued_at, job.c.not_before)
    query = (
        select(
            job.c.profile,
            job.c.wave_key,
            func.count(),
            func.count().filter(job.c.crashed_waves >= ALONE_AFTER),
            extract("epoch", db_now() - func.min(since)).cast(Float),
        )
        .where(job.c.state == State.QUEUED, job.c.profile.in_(list(wave_sizes)))
        .where(job.c.not_before <= db_now())
        .group_by(job.c.profile, job.c.wave_key)
        .order_by(job.c.profile, job.c.wave_key)
    )
    controls = list_controls(conn)
    found = []
    for profile, key, num_waiting, num_alone, oldest_s in conn.execute(query).all():
        control = controls.get(profile, Control(profile))
        slots = slots_to_fill(control, wave_sizes[profile])
        limits = (slots, oldest_s, control.wave_max_wait_s, control.wave_fill)
        found.append(Forming(profile, key, num_waiting, num_alone, *limits))
    return found


def list_waves(conn: Connection, *, profile: str | None = None, limit: int = 50) -> list[Wave]:
    """Return the newest waves with their members."""
    query = select(wave).order_by(wave.c.formed_at.desc(), wave.c.id.desc()).limit(limit)
    if profile is not None:
        query = query.where(wave.c.profile == profile)
    rows = conn.execute(query).mappings().all()
    members = _members(conn, [row["id"] for row in rows])
    return [Wave(**row, members=members.get(row["id"], [])) for row in rows]


def num_ghosts(conn: Connection, since: datetime) -> int:
    """Return how many slots of the waves since then had no live job."""
    total = select(func.coalesce(func.sum(wave.c.num_ghosts), 0)).where(wave.c.formed_at >= since)
    return int(conn.execute(total).scalar_one())


def end_wave(conn: Connection, wave_id: str, outcome: str, num_ghosts: int) -> None:
    """Record how a wave ended and how many slots were ghosts by then; a second word changes nothing."""
    row = (wave.c.id == wave_id) & wave.c.ended_at.is_(None)
    formed = conn.execute(
        select(wave.c.profile, wave.c.num_ghosts).where(row).with_for_update()
    ).one_or_none()
    if formed is None:
        return
    values: dict[str, Any] = {"outcome": outcome, "ended_at": db_now(), "num_ghosts": num_ghosts}
    conn.execute(update(wave).where(row).values(**values))
    after_commit(conn, lambda: count_late_ghosts(formed.profile, num_ghosts - formed.num_ghosts))


def slots_to_fill(control: Control, num_slots: int) -> int:
    """Return how many members a wave waits for: all slots, unless an operator has asked for fewer."""
    return min(control.wave_size or num_slots, num_slots)


def _members(conn: Connection, wave_ids: Sequence[str]) -> dict[str, list[WaveMember]]:
    query = select(job_attempt.c.wave_id, job_attempt.c.job_id, job_attempt.c.epoch, job_attempt.c.outcome)
    found: dict[str, list[WaveMember]] = {}
    rows = conn.execute(query.where(job_attempt.c.wave_id.in_(wave_ids)).order_by(job_attempt.c.job_id))
    for wave_id, *member in rows.all():
        found.setdefault(wave_id, []).append(WaveMember(*member))
    return found
