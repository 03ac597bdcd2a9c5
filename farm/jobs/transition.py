"""The only writer of a job's state.

Every move locks the row, checks the edge and the epoch, and then writes, in the caller's transaction: the
row, the next event, the attempt, the account's counters, the webhook messages of everybody who subscribed,
and a doorbell where somebody may start at once. So none of these can exist without the others. Rows are
always locked in the order job, account_usage, batch. Deciding *whether* to move is the callers' business.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    CTE,
    Connection,
    Interval,
    Select,
    bindparam,
    case,
    func,
    insert,
    literal,
    select,
    update,
)

from farm.batches import count_end
from farm.clock import db_now
from farm.db.session import after_commit
from farm.db.tables import account_usage, job, job_attempt, job_event, outbox
from farm.jobs import admission
from farm.jobs.job import Event, Job
from farm.jobs.states import ACTIVE, TERMINAL, State, sources
from farm.metrics.moves import count_fenced, count_move
from farm.outbox import doorbell, doorbell_payload, enqueue_doorbell
from farm.tracing import trace_move
from farm.webhooks.messages import hearers, write_messages

_OUTCOMES = {
    State.QUEUED: "requeued",
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.CANCELED: "canceled",
}


@dataclass(frozen=True)
class Locked:
    """A job whose row this transaction has locked, and the database's time after the wait for it."""

    job: Job
    at: datetime

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> "Locked":
        """Take a row of all columns and `now_at`."""
        values = dict(row)
        at = values.pop("now_at")
        return cls(Job.from_row(values), at)


def insert_job(
    conn: Connection,
    values: Mapping[str, Any],
    *,
    head_start: timedelta,
    queue_time: timedelta,
    wave_size: int,
    max_running: int,
) -> Job:
    """Write a new job as `queued` with its first event and doorbell; the caller has counted it.

    One statement, since every round trip is felt by whoever submits, and built once, since that costs more
    than running it.

    Args:
        conn: The transaction that counted it.
        values: Columns of the job.
        head_start: By so much it stands before others of the same instant.
        queue_time: So long it may wait.
        wave_size: Slots of its profile's layout.
        max_running: Of accounts that have no limit of their own.

    Raises:
        ProfilePausedError, ProfileFullError: The caller's transaction must not be committed.
    """
    data = {"profile": values["profile"]}
    given = {
        **{f"given_{name}": value for name, value in values.items()},
        "data": data,
        "ring": doorbell_payload(values["id"], values["profile"]),
        "head_start": head_start,
        "queue_time": queue_time,
        **admission.sentences(values["profile"], wave_size, max_running),
    }
    written = conn.execute(_insertion(tuple(values)), given).mappings().one()
    admission.check(values["profile"], written)
    queued = Job.from_row(written)
    if written["is_heard"]:
        write_messages(conn, queued, Event(queued.id, 1, State.QUEUED, queued.created_at, 0, data))
    return queued


@cache
def _insertion(names: tuple[str, ...]) -> Select[Any]:
    given = {name: bindparam(f"given_{name}", type_=job.c[name].type) for name in names}
    # now() is one instant for the whole transaction, and the default of created_at and queued_at.
    order = {
        "rank_at": func.now() - bindparam("head_start", type_=Interval()),
        "queue_deadline": func.now() + bindparam("queue_time", type_=Interval()),
    }
    columns = {**given, **order, "notices": admission.notices(given)}
    row = insert(job).values(state=State.QUEUED, **columns).returning(job).cte("new")
    data = bindparam("data", type_=job_event.c.data.type)
    event = {"job_id": given["id"], "seq": 1, "type": State.QUEUED, "epoch": 0, "data": data}
    first = insert(job_event).values(**event, at=func.now()).cte("event")
    ring, notice = doorbell(bindparam("ring", type_=outbox.c.payload.type))
    is_heard = hearers(given["account_id"], given["id"], State.QUEUED).exists().label("is_heard")
    return select(row, notice, is_heard, *admission.facts(given)).add_cte(first, ring)


def lock_job(conn: Connection, job_id: str) -> Locked | None:
    """Lock a job for this transaction and return it as it is now; None when there is none."""
    query = select(job, db_now().label("now_at")).where(job.c.id == job_id).with_for_update()
    row = conn.execute(query).mappings().one_or_none()
    return None if row is None else Locked.from_row(row)


def transition(conn: Connection, job_id: str, *, to: State, **options: Any) -> Job | None:
    """Lock a job and move it, if it may move; options and answer are those of `move`."""
    locked = lock_job(conn, job_id)
    return None if locked is None else move(conn, locked, to=to, **options)


def move(
    conn: Connection,
    locked: Locked,
    *,
    to: State,
    epoch: int | None = None,
    from_states: Collection[State] | None = None,
    event_data: Mapping[str, Any] | None = None,
    attempt: Mapping[str, Any] | None = None,
    after_s: Mapping[str, float] | None = None,
    **columns: Any,
) -> Job | None:
    """Move a locked job, if it may move.

    Args:
        conn: The transaction that locked it.
        locked: As it is now.
        to: Where to.
        epoch: The fencing token of a worker; None for moves that no worker makes.
        from_states: A narrower choice than the edge table's.
        event_data: Goes into the event, beside the state it came from.
        attempt: Columns of the attempt that this move begins, advances or ends.
        after_s: Columns of the job that become the instant of the move plus so many seconds.
        **columns: Other columns of the job.

    Returns:
        The job after the move; None when the edge does not exist, or the epoch is stale.
    """
    before, at = locked.job, locked.at
    allowed = sources(to) if from_states is None else sources(to).intersection(from_states)
    if before.state not in allowed or (epoch is not None and before.epoch != epoch):
        if epoch is not None:
            after_commit(conn, lambda: count_fenced(before.profile))
        return None
    later = {name: at + timedelta(seconds=seconds) for name, seconds in (after_s or {}).items()}
    values = {**_columns_of(to, before, at), **later, **columns, "state": to, "seq": before.seq + 1}
    moved = update(job).where(job.c.id == before.id).values(**values).returning(job)
    after = Job.from_row(conn.execute(moved).mappings().one())
    along = [*_attempt_change(before, after, at, attempt or {}), *_usage_change(before, after, at)]
    _record(conn, after, to, at, {"from": before.state, **(event_data or {})}, along)
    ended = (to in TERMINAL) - (before.state in TERMINAL)
    if after.batch_id is not None and ended:
        count_end(conn, after.batch_id, at, ended)
    if to is State.QUEUED and after.not_before <= at:
        enqueue_doorbell(conn, after.id, after.profile)
    failure = (event_data or {}).get("failure")
    after_commit(conn, lambda: _tell_after_commit(before, after, failure))
    return after


def _tell_after_commit(before: Job, after: Job, failure: str | None) -> None:
    count_move(before, after, failure)
    trace_move(before, after, failure)


def record_event(
    conn: Connection, locked: Locked, kind: str, data: Mapping[str, Any] | None = None, **columns: Any
) -> Job:
    """Write an event that is not a move, with the columns that it changes."""
    if "state" in columns:
        raise ValueError("record_event moves nothing; use transition")
    changed = update(job).where(job.c.id == locked.job.id).values(**columns, seq=job.c.seq + 1).returning(job)
    after = Job.from_row(conn.execute(changed).mappings().one())
    _record(conn, after, kind, locked.at, data or {})
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


def _attempt_change(before: Job, after: Job, at: datetime, values: Mapping[str, Any]) -> list[CTE]:
    if after.state is State.STARTING:
        row = {
            "job_id": after.id,
            "epoch": after.epoch,
            "group_id": after.group_id,
            "profile": after.profile,
            "queued_at": _waiting_since(before),
            "started_at": after.started_at,
        }
        return [insert(job_attempt).values(**row, **values).cte("attempt")]
    if before.state not in ACTIVE:
        return []
    if after.state in ACTIVE:
        changes = {**values, f"{after.state}_at": at}
    else:
        changes = {**values, "ended_at": at, "outcome": _OUTCOMES[after.state]}
    of_job = (job_attempt.c.job_id == before.id) & (job_attempt.c.epoch == before.epoch)
    return [update(job_attempt).where(of_job).values(**changes).cte("attempt")]


def _waiting_since(before: Job) -> Any:
    """Return since when a job that starts has waited: a requeue keeps `queued_at`, which is its place."""
    if not before.epoch:
        return before.queued_at
    last_end = select(func.max(job_attempt.c.ended_at)).where(job_attempt.c.job_id == before.id)
    return func.greatest(before.queued_at, last_end.scalar_subquery())


def _usage_change(before: Job, after: Job, at: datetime) -> list[CTE]:
    """Keep `account_usage` equal to a count of the account's jobs, and settle GPU-seconds at the end."""
    to = after.state
    queued = (to is State.QUEUED) - (before.state is State.QUEUED)
    running = (to in ACTIVE) - (before.state in ACTIVE)
    if not queued and not running:
        return []
    usage = account_usage.c
    changes: dict[str, Any] = {"queued": usage.queued + queued, "running": usage.running + running}
    if before.state in TERMINAL:
        changes["gpu_s_reserved"] = usage.gpu_s_reserved + after.gpu_s_reserved
    if to in TERMINAL:
        # Counters that drifted must not stop a job; the recount mends and reports them.
        changes["gpu_s_reserved"] = func.greatest(usage.gpu_s_reserved - before.gpu_s_reserved, 0)
        today = at.date()
        used = case((usage.day == today, usage.gpu_s_used), else_=0)
        changes |= {"day": today, "gpu_s_used": used + _gpu_s(before, at)}
    return [update(account_usage).where(usage.account_id == before.account_id).values(**changes).cte("usage")]


def _gpu_s(before: Job, at: datetime) -> int:
    """Return what the attempt that ends here took; attempts that the farm lost are not the account's."""
    if before.state not in ACTIVE or before.started_at is None:
        return 0
    return math.ceil((at - before.started_at).total_seconds() * before.gpus)


def _record(
    conn: Connection,
    after: Job,
    kind: str,
    at: datetime,
    data: Mapping[str, Any],
    along: Collection[CTE] = (),
) -> None:
    """Write the event and what goes along with it in one round trip, then tell who subscribed."""
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
    conn.execute(select(literal(1)).add_cte(insert(job_event).values(**row).cte("event"), *along))
    write_messages(conn, after, event)
