"""What a user does to a job: cancel, delete, retry.

Each locks the job first, so it and a worker's write are one after the other: whoever commits first wins, and
the other sees it.
"""

from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, select

from farm.accounts import max_queued
from farm.db.tables import account_usage
from farm.errors import AlreadyFinishedError, NotFoundError, NotRetryableError, QueueFullError
from farm.jobs.job import DEFAULT_RULES, PRIORITY_HEAD_START, Job, Rules
from farm.jobs.policy import error_of
from farm.jobs.states import RETRYABLE, State
from farm.jobs.transition import Locked, lock_job, move, record_event
from magi2.contract import GenerationRequest, wave_key


def request_cancel(conn: Connection, account_id: str, job_id: str, by: str) -> Job:
    """Cancel a queued job at once, or ask its group to stop; asking again changes nothing.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
        AlreadyFinishedError: The job has ended, canceled or otherwise.
    """
    locked = _lock_visible(conn, account_id, job_id)
    if locked.job.is_finished:
        raise AlreadyFinishedError(job_id, locked.job.state)
    return _stop(conn, locked, by)


def delete_job(conn: Connection, account_id: str, job_id: str, by: str) -> Job:
    """Hide a job at once and for ever, and stop it if it runs; its objects are removed by a sweep.

    Raises:
        NotFoundError: Unknown, deleted before, or of another account.
    """
    locked = _lock_visible(conn, account_id, job_id)
    if not locked.job.is_finished:
        _stop(conn, locked, by)
    return record_event(conn, locked, "deleted", {"by": by}, deleted_at=locked.at)


def retry(
    conn: Connection,
    account_id: str,
    job_id: str,
    *,
    profile: str | None = None,
    priority: int | None = None,
    seed: int | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Job:
    """Queue a failed, canceled or expired job again under the same id with a new budget.

    Args:
        conn: The caller's transaction.
        account_id: Whose job it must be.
        job_id: Which job.
        profile: Another profile, which the caller has checked against the request; None keeps the old one.
        priority: Another priority; None keeps the old one.
        seed: Another seed; None keeps the old one.
        rules: Holds the default quota.

    Raises:
        NotFoundError, NotRetryableError, QueueFullError: As their names say.
    """
    locked = _lock_visible(conn, account_id, job_id)
    found = locked.job
    if found.state in RETRYABLE:
        _check_room(conn, account_id, rules)
    columns = _fresh_budget(locked, priority if priority is not None else found.priority)
    if seed is not None:
        request = GenerationRequest.from_json({**found.params, "seed": seed})
        columns |= {"seed": seed, "params": request.to_json(), "wave_key": wave_key(request)}
    if profile is not None:
        columns |= {"profile": profile, "requested_profile": profile}
    again = move(conn, locked, to=State.QUEUED, from_states=RETRYABLE, **columns)
    if again is None:
        raise NotRetryableError(job_id, found.state)
    return again


def _stop(conn: Connection, locked: Locked, by: str) -> Job:
    found = locked.job
    asked: dict[str, Any] = {"cancel_requested_at": locked.at, "cancel_by": by}
    if found.state is State.QUEUED:
        error = error_of("canceled")
        return move(conn, locked, to=State.CANCELED, event_data={"by": by}, error=error, **asked) or found
    if found.cancel_requested_at is not None:
        return found
    return record_event(conn, locked, "cancel_requested", {"by": by}, **asked)


def _lock_visible(conn: Connection, account_id: str, job_id: str) -> Locked:
    locked = lock_job(conn, job_id)
    if locked is None or locked.job.account_id != account_id or locked.job.deleted_at is not None:
        raise NotFoundError(job_id)
    return locked


def _check_room(conn: Connection, account_id: str, rules: Rules) -> None:
    """Lock the account's counters and refuse one job too many; job rows come first in the order of locks."""
    mine = account_usage.c.account_id == account_id
    queued = conn.execute(select(account_usage.c.queued).where(mine).with_for_update()).scalar_one()
    limit = max_queued(conn, account_id, rules)
    if queued >= limit:
        raise QueueFullError(limit)


def _fresh_budget(locked: Locked, priority: int) -> dict[str, Any]:
    at = locked.at
    return {
        "attempts": 0,
        "infra_losses": 0,
        "preemptions": 0,
        "crash_count": 0,
        "engine_errors": 0,
        "upload_failures": 0,
        "crash_groups": [],
        "avoid_group": None,
        "retry_count": locked.job.retry_count + 1,
        "cancel_requested_at": None,
        "cancel_by": None,
        "priority": priority,
        "queued_at": at,
        "rank_at": at - priority * PRIORITY_HEAD_START,
        "queue_deadline": at + timedelta(seconds=locked.job.expires_in_s),
    }
