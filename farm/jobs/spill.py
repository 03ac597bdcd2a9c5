"""Move waiting jobs to another profile: where theirs is served by nobody, or where a wave cannot be filled.

Where a job may go is said by `profiles.yaml` (`spill`, and `auto` for jobs that asked for it); it never goes
to a profile whose caps refuse it, that is paused, or that no idle or busy group serves. Every move is an
event, `rerouted`. An operator's own reroute is in `farm/jobs/control.py`.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import structlog
from sqlalchemy import Connection, select

from farm.clock import db_now, db_seconds
from farm.db.tables import job, worker_group
from farm.groups import FRESH_S
from farm.jobs.job import Job
from farm.jobs.states import State
from farm.jobs.transition import Locked, record_event
from farm.outbox import enqueue_doorbell
from farm.profile_control import list_controls, paused_profiles
from farm.profiles import Profile, Profiles
from farm.waves import ALONE_AFTER, forming_waves
from magi2.contract import GenerationRequest

log = structlog.get_logger(__name__)

UNSERVED_S = 600.0
LIMIT = 200
UNSERVED, UNFILLED = "unserved", "wave_unfilled"


def spill_unserved(conn: Connection, profiles: Profiles, *, limit: int = LIMIT) -> int:
    """Move jobs whose profile has had no live group for ten minutes; return how many."""
    usable = usable_profiles(conn)
    recent = db_now() - db_seconds(UNSERVED_S)
    was_served = (
        select(worker_group.c.id)
        .where(worker_group.c.profile == job.c.profile, worker_group.c.state != "sick")
        .where(worker_group.c.heartbeat_at > recent)
    )
    stuck = (
        select(job.c.id)
        .where(job.c.state == State.QUEUED, job.c.queued_at < recent, ~was_served.exists())
        .where(job.c.profile.in_(_with_somewhere_to_go(profiles, usable)))
        .order_by(job.c.rank_at, job.c.id)
        .limit(limit)
    )
    return _move_all(conn, profiles, conn.execute(stuck).scalars(), usable, UNSERVED)


def spill_unfilled(conn: Connection, profiles: Profiles, *, limit: int = LIMIT) -> int:
    """Move jobs that have waited long enough for a wave that is not full, where the profile says `spill`."""
    spilling = {name for name, control in list_controls(conn).items() if control.wave_fill == "spill"}
    sizes = {name: size for name, size in profiles.wave_sizes.items() if name in spilling}
    if not sizes:
        return 0
    usable = usable_profiles(conn) - set(profiles.wave_sizes)
    num_moved = 0
    for forming in forming_waves(conn, sizes):
        if not forming.is_due or forming.num_waiting - forming.num_alone >= forming.num_slots:
            continue
        waiting = (
            select(job.c.id)
            .where(job.c.state == State.QUEUED, job.c.profile == forming.profile)
            .where(job.c.wave_key == forming.wave_key, job.c.crashed_waves < ALONE_AFTER)
            .where(job.c.not_before <= db_now())
            .order_by(job.c.rank_at, job.c.id)
            .limit(limit)
        )
        num_moved += _move_all(conn, profiles, conn.execute(waiting).scalars(), usable, UNFILLED)
    return num_moved


def usable_profiles(conn: Connection) -> set[str]:
    """Return the profiles that some group could start a job of right now."""
    serving = (
        select(worker_group.c.profile)
        .where(worker_group.c.state.in_(("ready", "busy")))
        .where(worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S))
    )
    return set(conn.execute(serving).scalars()) - paused_profiles(conn)


def _with_somewhere_to_go(profiles: Profiles, usable: AbstractSet[str]) -> list[str]:
    allowed = {name: {*row.spill, *profiles.auto} - {name} for name, row in profiles.by_name.items()}
    return [name for name, others in allowed.items() if others & usable]


def _move_all(
    conn: Connection, profiles: Profiles, job_ids: Iterable[str], usable: AbstractSet[str], why: str
) -> int:
    """Move those that may go somewhere; rows that somebody holds are left to the next sweep."""
    columns = select(job, db_now().label("now_at")).where(job.c.id.in_(list(job_ids)))
    held = columns.where(job.c.state == State.QUEUED).order_by(job.c.id).with_for_update(skip_locked=True)
    num_moved = 0
    for row in conn.execute(held).mappings().all():
        locked = Locked.from_row(row)
        found = locked.job
        if found.profile not in profiles.by_name:
            continue
        request = GenerationRequest.from_json(found.params)
        is_auto = found.requested_profile == "auto"
        target = profiles.spill(found.profile, usable, request, is_auto=is_auto)
        if target is not None:
            _move(conn, locked, profiles, target, why)
            num_moved += 1
    return num_moved


def _move(conn: Connection, locked: Locked, profiles: Profiles, target: Profile, why: str) -> Job:
    before = locked.job
    source = profiles.by_name.get(before.profile)
    timeout_s = min(before.exec_timeout_s, target.execution_timeout_cap_s)
    if source is not None and before.exec_timeout_s == source.execution_timeout_s:
        timeout_s = target.execution_timeout_s  # it was the profile's, not the user's
    moved = record_event(
        conn,
        locked,
        "rerouted",
        {"from": before.profile, "to": target.name, "why": why},
        profile=target.name,
        exec_timeout_s=timeout_s,
        gpus=target.gpus,
        reuse_key=None,
        avoid_group=None,
    )
    log.info("job_rerouted", job_id=moved.id, profile=target.name, was=before.profile, why=why)
    enqueue_doorbell(conn, moved.id, moved.profile)
    return moved
