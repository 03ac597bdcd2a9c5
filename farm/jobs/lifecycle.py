"""What happens to a job after it was claimed, and how it ends.

Every call of a worker names its epoch; a stale one changes nothing and says so by None or False, and the
worker must then throw its result away and touch the job no more. Where the answer to a commit is lost on its
way, the worker asks again: a move that its epoch has made already is confirmed, and nothing is written. An
epoch belongs to one group, so nobody else can have made it. Users' own acts (cancel, delete, retry) are
in `farm/jobs/control.py`.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import Connection, ScalarSelect, func, insert, or_, select, update

from farm import quarantine
from farm.clock import db_after, db_now, db_seconds
from farm.db.tables import asset, job, job_attempt, wave, worker_group
from farm.ids import new_id
from farm.jobs.job import DEFAULT_RULES, Beat, Job, NewAsset, Rules
from farm.jobs.phases import Progress
from farm.jobs.policy import Action, Failure, FailureKind, decide, error_of
from farm.jobs.states import ACTIVE, State
from farm.jobs.transition import Locked, lock_job, move, transition
from farm.quarantine import Reason
from farm.webhooks.messages import write_progress

log = structlog.get_logger(__name__)

# An agent that is alive ends an attempt at its deadline by itself; the sweep waits so much longer for it.
DEADLINE_GRACE_S = 120.0
SWEEP_LIMIT = 200
_RANDOM = secrets.SystemRandom()


@dataclass(frozen=True)
class Result:
    """What a finished attempt leaves beside its objects; `data` becomes `job.result` (stats, fingerprint)."""

    data: dict[str, Any]
    assets: Sequence[NewAsset]
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: int | None = None
    measured: Mapping[str, Any] | None = None


def beat(
    conn: Connection,
    job_id: str,
    epoch: int,
    group_id: str,
    progress: Progress | None,
    *,
    rules: Rules = DEFAULT_RULES,
) -> Beat | None:
    """Extend the lease, store the progress and tell it to who asked; None means that the lease is lost."""
    values: dict[str, Any] = {"lease_until": db_after(rules.lease_s)}
    if progress is not None:
        percent = func.greatest(job.c.progress, progress.percent)
        # `step` belongs to `steps`: windows that were decoded and the like do not count there.
        step = job.c.steps if progress.denoised is None else func.least(progress.denoised, job.c.steps)
        values |= {"phase": progress.phase, "step": step, "progress": percent}
    wanted = select(worker_group.c.wanted_state).where(worker_group.c.id == group_id).scalar_subquery()
    extended = (
        update(job)
        .where(job.c.id == job_id, job.c.epoch == epoch, job.c.group_id == group_id, job.c.state.in_(ACTIVE))
        .values(**values)
        .returning(
            job.c.cancel_requested_at.is_not(None),
            func.coalesce(job.c.attempt_deadline < db_now(), False),
            wanted,
        )
    )
    row = conn.execute(extended).one_or_none()
    if row is None:
        return None
    if progress is not None:
        write_progress(conn, job_id)
    return Beat(rules.lease_s, row[0], row[1], row[2])


def mark_running(conn: Connection, job_id: str, epoch: int) -> bool:
    """Record that the first rank reported work; False when fenced out."""
    return _advance(conn, job_id, epoch, State.RUNNING)


def mark_uploading(conn: Connection, job_id: str, epoch: int) -> bool:
    """Record that the file is encoded and checked; when this returns False, nothing may be uploaded."""
    return _advance(conn, job_id, epoch, State.UPLOADING)


def succeed(conn: Connection, job_id: str, epoch: int, result: Result) -> bool:
    """Finish a job whose objects are stored and verified.

    False when fenced out, and when a cancel came first: then the job is canceled here. In both cases the
    output is garbage, which a sweep removes.
    """
    locked = lock_job(conn, job_id)
    if _has_made(locked, epoch, State.SUCCEEDED):
        return True
    held = _if_held(locked, epoch)
    if held is None or held.job.state is not State.UPLOADING:
        return False
    if held.job.cancel_requested_at is not None:
        _cancel(conn, held)
        return False
    rows = [
        {
            **asdict(stored),
            "id": new_id("asset"),
            "account_id": held.job.account_id,
            "job_id": job_id,
            "epoch": epoch,
            "expires_at": held.at + timedelta(seconds=held.job.retention_s),
        }
        for stored in result.assets
    ]
    conn.execute(insert(asset).values(rows))
    attempt = {
        "timings": result.timings,
        "peak_memory_mb": result.peak_memory_mb,
        "measured": result.measured,
    }
    done = move(conn, held, to=State.SUCCEEDED, result=result.data, attempt=attempt)
    return done is not None


def fail(
    conn: Connection,
    job_id: str,
    epoch: int,
    failure: Failure,
    *,
    rules: Rules = DEFAULT_RULES,
    jitter: float | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Job | None:
    """End an attempt by the failure table: requeue, fail, or cancel if that was asked for.

    Args:
        conn: A transaction of the caller.
        job_id: Of the job.
        epoch: Of the attempt.
        failure: What ended it.
        rules: Of the farm.
        jitter: From -1 to 1, instead of a drawn one.
        measured: Peaks of memory until then, kept with the attempt.

    Returns:
        The job afterwards (its `state` says which of the three); None when fenced out.
    """
    held = _lock_held(conn, job_id, epoch)
    if held is None:
        return None
    spread = _RANDOM.uniform(-1, 1) if jitter is None else jitter
    action = decide(failure, held.job, rules=rules, jitter=spread)
    return _apply(conn, held, failure, action, measured)


def release(conn: Connection, job_id: str, epoch: int) -> Job | None:
    """Give a job back at once, to its old place in the queue (drain); None when fenced out."""
    return fail(conn, job_id, epoch, Failure(FailureKind.PREEMPTED))


def finish_cancel(conn: Connection, job_id: str, epoch: int) -> Job | None:
    """Cancel a job whose ranks have stopped; None when fenced out or when nobody asked for it."""
    held = _lock_held(conn, job_id, epoch)
    if held is None or held.job.cancel_requested_at is None:
        return None
    return _cancel(conn, held)


def reap_leases(conn: Connection, *, rules: Rules = DEFAULT_RULES, limit: int = SWEEP_LIMIT) -> int:
    """Take back active jobs whose lease, or whose deadline and some grace, has passed; return how many.

    All rows are locked first and then treated account by account, so that two sweeps, and a sweep and a
    worker, always take locks in the same order.
    """
    is_lost = job.c.lease_until < db_now()
    is_late = job.c.attempt_deadline < db_now()
    is_much_too_late = job.c.attempt_deadline < db_now() - db_seconds(DEADLINE_GRACE_S)
    found = (
        select(
            job.c.id,
            job.c.account_id,
            job.c.epoch,
            job.c.group_id,
            func.coalesce(is_late, False).label("is_late"),
            func.coalesce(_neighbours(), 0).label("neighbours"),
        )
        .where(job.c.state.in_(ACTIVE), or_(is_lost, is_much_too_late))
        .limit(limit)
        .with_for_update(of=job, skip_locked=True)
    )
    rows = sorted(conn.execute(found), key=lambda row: (row.account_id, row.id))
    for row in rows:
        kind = FailureKind.DEADLINE if row.is_late else FailureKind.AGENT_LOST
        log.warning("lease_swept", job_id=row.id, epoch=row.epoch, group=row.group_id, err=kind.value)
        fail(conn, row.id, row.epoch, Failure(kind, neighbours=row.neighbours), rules=rules)
    return len(rows)


def expire_queued(conn: Connection, *, limit: int = SWEEP_LIMIT) -> int:
    """Expire queued jobs whose queue deadline has passed; return how many."""
    found = (
        select(job.c.id, job.c.account_id)
        .where(job.c.state == State.QUEUED, job.c.queue_deadline < db_now())
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = sorted(conn.execute(found), key=lambda row: (row.account_id, row.id))
    for row in rows:
        code = "expired" if _is_served(conn, row.id) else "profile_unavailable"
        transition(conn, row.id, to=State.EXPIRED, error=error_of(code))
    return len(rows)


def _is_served(conn: Connection, job_id: str) -> bool:
    """Tell whether any group serves the profile that the job waits for."""
    live = select(worker_group.c.id).where(
        worker_group.c.profile == job.c.profile, worker_group.c.state != "gone"
    )
    return bool(conn.execute(select(live.exists()).where(job.c.id == job_id)).scalar_one())


def _neighbours() -> ScalarSelect[int]:
    """Count the other members of the wave in which a job runs; null where it runs in none."""
    return (
        select(wave.c.num_members - 1)
        .join(job_attempt, job_attempt.c.wave_id == wave.c.id)
        .where(job_attempt.c.job_id == job.c.id, job_attempt.c.epoch == job.c.epoch)
        .scalar_subquery()
    )


def _advance(conn: Connection, job_id: str, epoch: int, to: State) -> bool:
    """Move an attempt on, or confirm that it is there; False when fenced out."""
    locked = lock_job(conn, job_id)
    if locked is None:
        return False
    return _has_made(locked, epoch, to) or move(conn, locked, to=to, epoch=epoch) is not None


def _has_made(locked: Locked | None, epoch: int, to: State) -> bool:
    """Tell whether this epoch has brought the job to where it is: the call is a repeated one."""
    return locked is not None and locked.job.epoch == epoch and locked.job.state is to


def _lock_held(conn: Connection, job_id: str, epoch: int) -> Locked | None:
    """Lock a job and return it if this epoch still holds it."""
    return _if_held(lock_job(conn, job_id), epoch)


def _if_held(locked: Locked | None, epoch: int) -> Locked | None:
    return locked if locked is not None and locked.job.epoch == epoch and locked.job.is_active else None


def _cancel(conn: Connection, held: Locked) -> Job | None:
    data = {"by": held.job.cancel_by}
    return move(conn, held, to=State.CANCELED, event_data=data, error=error_of("canceled"))


def _apply(
    conn: Connection, held: Locked, failure: Failure, action: Action, measured: Mapping[str, Any] | None
) -> Job | None:
    """Do what was decided; the reason stays with the attempt, for operators."""
    profile = held.job.profile
    columns = dict(action.columns)
    after_s: dict[str, float] = {}
    if action.to is State.QUEUED:
        after_s = {"queue_deadline": held.job.expires_in_s, "not_before": action.delay_s}
    else:
        columns["error"] = action.error
    reason = {"code": str(failure.kind), "message": failure.message, "detail": failure.detail}
    event_data: dict[str, Any] = {"failure": str(failure.kind)}
    if action.columns.get("profile", profile) != profile:
        event_data |= {"rerouted_from": profile, "rerouted_to": action.columns["profile"]}
    after = move(
        conn,
        held,
        to=action.to,
        event_data=event_data,
        attempt={"error": reason, "measured": measured},
        after_s=after_s,
        **columns,
    )
    if after is not None:
        _tell(held.job, after, failure, action)
        if action.to is State.FAILED and (action.error or {}).get("code") == "poison_job":
            quarantine.put(conn, after.id, after.epoch, Reason.POISON, _evidence(conn, after))
    return after


def _tell(before: Job, after: Job, failure: Failure, action: Action) -> None:
    """Write one line for what became of an attempt; who reads only the log must not have to guess."""
    word = {State.QUEUED: "job_requeued", State.FAILED: "job_failed"}.get(after.state, "job_canceled")
    facts = {"job_id": after.id, "epoch": after.epoch, "group": before.group_id, "profile": after.profile}
    log.info(word, **facts, failure=str(failure.kind), wait_s=round(action.delay_s, 1))


def _evidence(conn: Connection, poison: Job) -> dict[str, Any]:
    """Gather what the attempts of a poison job left behind, for the operator who has to judge it."""
    attempts = (
        select(job_attempt.c.epoch, job_attempt.c.group_id, job_attempt.c.error)
        .where(job_attempt.c.job_id == poison.id, job_attempt.c.error.is_not(None))
        .order_by(job_attempt.c.epoch)
    )
    return {
        "crash_count": poison.crash_count,
        "crash_groups": poison.crash_groups,
        "crashed_waves": poison.crashed_waves,
        "attempts": [dict(row) for row in conn.execute(attempts).mappings()],
    }
