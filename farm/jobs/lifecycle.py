"""What happens to a job after it was claimed, and how it ends.

Every call of a worker names its epoch; a stale one changes nothing and says so by None or False, and the worker must
then throw its result away and touch the job no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from farm.jobs.job import DEFAULT_RULES, Beat, Job, NewAsset, Rules
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure


@dataclass(frozen=True)
class Result:
    """What a finished attempt leaves beside its objects; `data` becomes `job.result` (stats, fingerprint, probe)."""

    data: dict[str, Any]
    assets: Sequence[NewAsset]
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: int | None = None


def beat(
    conn: Connection,
    job_id: str,
    epoch: int,
    group_id: str,
    progress: Progress | None,
    *,
    rules: Rules = DEFAULT_RULES,
) -> Beat | None:
    """Extend the lease and store the progress; None means that the lease is lost."""
    ...


def mark_running(conn: Connection, job_id: str, epoch: int) -> bool:
    """Record that the first rank reported work; False when fenced out."""
    ...


def mark_uploading(conn: Connection, job_id: str, epoch: int) -> bool:
    """Record that the file is encoded and checked; nothing may be uploaded when this returns False."""
    ...


def succeed(conn: Connection, job_id: str, epoch: int, result: Result) -> bool:
    """Finish a job whose objects are stored and verified.

    False when fenced out, and when a cancel came first: then the job is canceled here and the output must be discarded.
    """
    ...


def fail(
    conn: Connection,
    job_id: str,
    epoch: int,
    failure: Failure,
    *,
    rules: Rules = DEFAULT_RULES,
    jitter: float | None = None,
) -> Job | None:
    """End an attempt by the failure table: requeue, fail, or cancel if that was asked for; None when fenced out."""
    ...


def release(conn: Connection, job_id: str, epoch: int, *, rules: Rules = DEFAULT_RULES) -> Job | None:
    """Give a job back at once, near the front of the queue (drain); None when fenced out."""
    ...


def finish_cancel(conn: Connection, job_id: str, epoch: int) -> Job | None:
    """Cancel a job whose ranks have stopped; None when fenced out or when nobody asked for it."""
    ...


def request_cancel(conn: Connection, account_id: str, job_id: str, by: str) -> Job:
    """Cancel a queued job at once, or ask its group to stop.

    Raises:
        NotFoundError, AlreadyFinishedError: As their names say.
    """
    ...


def delete_job(conn: Connection, account_id: str, job_id: str, by: str) -> Job:
    """Hide a job at once and for ever, and stop it if it runs; its objects are removed by a sweep."""
    ...


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

    Raises:
        NotFoundError, NotRetryableError, QueueFullError: As their names say.
    """
    ...


def reap_leases(conn: Connection, *, rules: Rules = DEFAULT_RULES, limit: int = 200) -> int:
    """Take back active jobs whose lease, or whose deadline and some grace, has passed; return how many."""
    ...


def expire_queued(conn: Connection, *, limit: int = 200) -> int:
    """Expire queued jobs whose queue deadline has passed; return how many."""
    ...
