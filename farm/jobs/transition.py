"""The only writer of a job's state.

Every move locks the row, checks the edge and the epoch, and then writes, in the caller's transaction: the
row, the next event, the attempt, the account's counters, the webhook messages of everybody who subscribed,
and a doorbell where somebody may start at once. So none of these can exist without the others. Rows are
always locked in the order job, then account_usage. Deciding *whether* to move is the business of the callers.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, insert, select, update

from farm.clock import db_now
from farm.db.tables import account_usage, job, job_attempt, job_event
from farm.jobs.job import Event, Job
from farm.jobs.states import ACTIVE, TERMINAL, State, sources
from farm.outbox import enqueue_doorbell
from farm.webhooks.messages import write_messages

_OUTCOMES = {
    State.QUEUED: "requeued",
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.CANCELED: "canceled",
}


def insert_job(conn: Connection, values: Mapping[str, Any]) -> Job:
    """Write a new job as `queued` with its first event and doorbell; the caller has counted it."""
    row = conn.execute(insert(job).values(state=State.QUEUED, **values).returning(job)).mappings().one()
    queued = Job.from_row(row)
    _write_event(conn, queued, State.QUEUED, queued.created_at, {"profile": queued.profile})
    enqueue_doorbell(conn, queued.id, queued.profile)
    return queued


def lock_job(conn: Connection, job_id: str) -> tuple[Job, datetime] | None:
    """Lock a job for this transaction; return it as it is now, and the database's time after the wait."""
    query = select(job, db_now().label("now_at")).where(job.c.id == job_id).with_for_update()
    row = conn.execute(query).mappings().one_or_none()
    if row is None:
        return None
    values = dict(row)
    now_at = values.pop("now_at")
    return Job.from_row(values), now_at


def transition(
    conn: Connection,
    job_id: str,
    *,
    to: State,
    epoch: int | None = None,
    from_states: Collection[State] | None = None,
    event_data: Mapping[str, Any] | None = None,
    attempt: Mapping[str, Any] | None = None,
    after_s: Mapping[str, float] | None = None,
    **columns: Any,
) -> Job | None:
    """Move a job, if it may move.

    Args:
        conn: The caller's transaction.
        job_id: Which one.
        to: Where to.
        epoch: The fencing token of a worker; None for moves that no worker makes.
        from_states: A narrower choice than the edge table's.
        event_data: Goes into the event, beside the state it came from.
        attempt: Columns of the attempt that this move ends or advances.
        after_s: Columns of the job that become the instant of the move plus so many seconds.
        **columns: Other columns of the job.

    Returns:
        The job after the move; None when the edge does not exist, or the epoch is stale.
    """
    allowed = sources(to) if from_states is None else sources(to).intersection(from_states)
    locked = lock_job(conn, job_id)
    if locked is None:
        return None
    before, at = locked
    if before.state not in allowed or (epoch is not None and before.epoch != epoch):
        return None
    later = {name: at + timedelta(seconds=seconds) for name, seconds in (after_s or {}).items()}
    values = {**_columns_of(to, before, at), **later, **columns, "state": to, "seq": before.seq + 1}
    moved = update(job).where(job.c.id == job_id).values(**values).returning(job)
    after = Job.from_row(conn.execute(moved).mappings().one())
    _write_attempt(conn, before, to, at, attempt or {})
    _count(conn, before, to)
    _write_event(conn, after, to, at, {"from": before.state, **(event_data or {})})
    if to is State.QUEUED and after.not_before <= at:
        enqueue_doorbell(conn, after.id, after.profile)
    return after


def record_event(
    conn: Connection, job_id: str, kind: str, data: Mapping[str, Any] | None = None, **columns: Any
) -> Job:
    """Write an event that is not a move, with the columns that it changes; the caller has locked the job."""
    if "state" in columns:
        raise ValueError("record_event moves nothing; use transition")
    query = select(job.c.seq, db_now()).where(job.c.id == job_id).with_for_update()
    seq, at = conn.execute(query).one()
    changed = update(job).where(job.c.id == job_id).values(**columns, seq=seq + 1).returning(job)
    after = Job.from_row(conn.execute(changed).mappings().one())
    _write_event(conn, after, kind, at, data or {})
    return after


def _columns_of(to: State, before: Job, at: datetime) -> dict[str, Any]:
    """Return what every move into a state changes, whoever makes it."""
    if to is State.STARTING:
        return {
            "epoch": before.epoch + 1,
            "attempts": before.attempts + 1,
            "phase": "load",
            "step": 0,
            "progress": 0,
            "started_at": at,
            "running_at": None,
            "uploading_at": None,
        }
    if to is State.RUNNING:
        return {"running_at": at}
    if to is State.UPLOADING:
        return {"uploading_at": at, "phase": "upload", "progress": max(before.progress, 98)}
    released = {"lease_until": None, "attempt_deadline": None, "phase": None}
    if to is State.QUEUED:
        waiting = {"group_id": None, "step": 0, "progress": 0, "not_before": at}
        return {**released, **waiting, "error": None, "finished_at": None}
    ended = {**released, "finished_at": at}
    return {**ended, "progress": 100, "error": None} if to is State.SUCCEEDED else ended


def _write_attempt(conn: Connection, before: Job, to: State, at: datetime, values: Mapping[str, Any]) -> None:
    if before.state not in ACTIVE:
        return
    changes = dict(values)
    if to in {State.RUNNING, State.UPLOADING}:
        changes[f"{to}_at"] = at
    else:
        changes |= {"ended_at": at, "outcome": _OUTCOMES[to]}
    of_job = (job_attempt.c.job_id == before.id) & (job_attempt.c.epoch == before.epoch)
    conn.execute(update(job_attempt).where(of_job).values(**changes))


def _count(conn: Connection, before: Job, to: State) -> None:
    """Keep `account_usage` equal to a count of the account's jobs."""
    queued = (to is State.QUEUED) - (before.state is State.QUEUED)
    running = (to in ACTIVE) - (before.state in ACTIVE)
    if queued or running:
        changes = {
            "queued": account_usage.c.queued + queued,
            "running": account_usage.c.running + running,
        }
        mine = account_usage.c.account_id == before.account_id
        conn.execute(update(account_usage).where(mine).values(**changes))


def _write_event(conn: Connection, after: Job, kind: str, at: datetime, data: Mapping[str, Any]) -> None:
    if kind in TERMINAL and after.error is not None:
        data = {**data, "code": after.error["code"]}
    event = Event(after.id, after.seq, str(kind), at, after.epoch, dict(data))
    row = {
        "job_id": event.job_id,
        "seq": event.seq,
        "type": event.type,
        "at": event.at,
        "epoch": event.epoch,
        "data": event.data,
    }
    conn.execute(insert(job_event).values(**row))
    write_messages(conn, after, event)
