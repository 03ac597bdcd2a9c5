"""What a user does to a job: cancel, delete, retry, change while it waits; an operator may quarantine it.

Each locks the job first, so it and a worker's write are one after the other: whoever commits first wins, and
the other sees it.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection

from farm import quarantine
from farm.accounts import check_room
from farm.errors import (
    AlreadyFinishedError,
    AlreadyStartedError,
    ContentExpiredError,
    NotFoundError,
    NotRetryableError,
    QuarantinedError,
)
from farm.jobs.job import DEFAULT_RULES, PRIORITY_HEAD_START, Job, Rules
from farm.jobs.policy import error_of
from farm.jobs.queries import get_input
from farm.jobs.states import RETRYABLE, State
from farm.jobs.transition import Locked, lock_job, move, record_event
from farm.outbox import enqueue_doorbell
from farm.quarantine import Reason
from magi2.contract import GenerationRequest, wave_key


@dataclass(frozen=True)
class Again:
    """What is different when a job is tried again; None keeps what it was, and the caller has checked it."""

    priority: int | None = None
    seed: int | None = None
    profile: str | None = None
    exec_timeout_s: int | None = None
    gpus: int | None = None
    gpu_s_reserved: int | None = None


@dataclass(frozen=True)
class Changes:
    """What changes of a job that waits; None keeps what it was."""

    priority: int | None = None
    metadata: dict[str, str] | None = None
    expires_in_s: int | None = None


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
    again: Again = Again(),
    *,
    rules: Rules = DEFAULT_RULES,
) -> Job:
    """Queue a failed, canceled or expired job again under the same id with a new budget.

    Raises:
        NotFoundError, NotRetryableError, QueueFullError, QuotaExceededError: As their names say.
        QuarantinedError: An operator must release it first.
        ContentExpiredError: Its image was removed.
    """
    locked = _lock_visible(conn, account_id, job_id)
    found = locked.job
    if found.state not in RETRYABLE:
        raise NotRetryableError(job_id, found.state)
    if quarantine.is_quarantined(conn, job_id):
        raise QuarantinedError(job_id)
    image = get_input(conn, found)
    if image is not None and image.deleted_at is not None:
        raise ContentExpiredError(job_id)
    columns = _fresh_budget(locked, again.priority if again.priority is not None else found.priority)
    if again.seed is not None:
        request = GenerationRequest.from_json({**found.params, "seed": again.seed})
        columns |= {"seed": again.seed, "params": request.to_json(), "wave_key": wave_key(request)}
        columns |= {"reuse_key": None}  # the digest was of the other seed
    if again.profile is not None:
        columns |= {"profile": again.profile, "requested_profile": again.profile, "reuse_key": None}
    for name in ("exec_timeout_s", "gpus", "gpu_s_reserved"):
        if getattr(again, name) is not None:
            columns[name] = getattr(again, name)
    check_room(conn, account_id, columns.get("gpu_s_reserved", found.gpu_s_reserved), rules)
    moved = move(conn, locked, to=State.QUEUED, from_states=RETRYABLE, **columns)
    if moved is None:
        raise NotRetryableError(job_id, found.state)
    return moved


def change_queued(conn: Connection, account_id: str, job_id: str, changes: Changes) -> Job:
    """Change a job that still waits; what is None stays as it is.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
        AlreadyStartedError, AlreadyFinishedError: It does not wait any more.
    """
    locked = _lock_waiting(conn, account_id, job_id)
    found = locked.job
    columns: dict[str, Any] = {}
    if changes.priority is not None:
        columns |= {
            "priority": changes.priority,
            "rank_at": found.queued_at - changes.priority * PRIORITY_HEAD_START,
        }
    if changes.metadata is not None:
        columns["metadata"] = changes.metadata
    if changes.expires_in_s is not None:
        later = timedelta(seconds=changes.expires_in_s - found.expires_in_s)
        columns |= {"expires_in_s": changes.expires_in_s, "queue_deadline": found.queue_deadline + later}
    if not columns:
        return found
    named = [name for name in ("priority", "metadata", "expires_in_s") if name in columns]
    return record_event(conn, locked, "changed", {"changed": named}, **columns)


def reroute(conn: Connection, account_id: str, job_id: str, to: Again) -> Job:
    """Let another profile run a job that waits; it keeps its place in the order of priority and age.

    Args:
        conn: The caller's transaction.
        account_id: Whose job it is.
        job_id: Which one.
        to: The profile, which the caller has checked takes the request, with its time limit and devices.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
        AlreadyStartedError, AlreadyFinishedError: It does not wait any more.
    """
    locked = _lock_waiting(conn, account_id, job_id)
    found = locked.job
    # The estimate of GPU-seconds stays: it was promised to the account when the job came.
    columns: dict[str, Any] = {"profile": to.profile, "requested_profile": to.profile}
    columns |= {"reuse_key": None, "avoid_group": None}
    given = {"exec_timeout_s": to.exec_timeout_s, "gpus": to.gpus}
    columns |= {name: value for name, value in given.items() if value is not None}
    moved = record_event(
        conn, locked, "rerouted", {"from": found.profile, "to": to.profile, "why": "operator"}, **columns
    )
    enqueue_doorbell(conn, moved.id, moved.profile)
    return moved


def quarantine_job(conn: Connection, job_id: str, by: str, note: str = "") -> Job:
    """Stop a job if it has not ended, and keep it from being retried; an operator's act on any account.

    Raises:
        NotFoundError: There is none of this id.
    """
    locked = lock_job(conn, job_id)
    if locked is None:
        raise NotFoundError(job_id)
    found = locked.job if locked.job.is_finished else _stop(conn, locked, by)
    quarantine.put(conn, job_id, found.epoch, Reason.OPERATOR, {"note": note}, by=by)
    return found


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


def _lock_waiting(conn: Connection, account_id: str, job_id: str) -> Locked:
    locked = _lock_visible(conn, account_id, job_id)
    if locked.job.is_finished:
        raise AlreadyFinishedError(job_id, locked.job.state)
    if locked.job.is_active:
        raise AlreadyStartedError(job_id, locked.job.state)
    return locked


def _fresh_budget(locked: Locked, priority: int) -> dict[str, Any]:
    at = locked.at
    return {
        "attempts": 0,
        "infra_losses": 0,
        "preemptions": 0,
        "crash_count": 0,
        "engine_errors": 0,
        "upload_failures": 0,
        "crashed_waves": 0,
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
