"""What happens to a job whose attempt failed: the failure table, as one pure function.

Nothing here reads a clock, a database or a random number; `farm/jobs/lifecycle.py` supplies them and does
what is decided.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from farm.jobs.job import DEFAULT_RULES, Job, Rules
from farm.jobs.states import State

BACKOFF_S = 10.0
MAX_BACKOFF_S = 600.0
MAX_JITTER = 0.2
MAX_ENGINE_ERRORS = 1  # after so many, the next one fails the job
MAX_UPLOAD_FAILURES = 2
POISON_CRASHES = 3  # anywhere
POISON_CRASHES_APART = 2  # on as many groups

_MESSAGES = {
    "canceled": "the job was canceled",
    "expired": "the job waited longer than its expires_in and was never started",
    "deadline_exceeded": "the attempt took longer than execution_timeout_s",
    "invalid_input": "the request cannot be rendered",
    "out_of_memory": "the job does not fit into the memory of its profile",
    "engine_error": "the engine failed on this job more than once",
    "worker_lost": "the workers of this job disappeared too often",
    "worker_crashed": "the worker crashed on every attempt",
    "poison_job": "the job crashed its workers too often and will not be started again by itself",
    "upload_failed": "the result could not be stored",
    "profile_unavailable": "no worker serves the profile of this job",
    "internal": "the farm failed on this job",
}
# The same request may do better another time.
_WORTH_A_RETRY = frozenset(_MESSAGES) - {"invalid_input", "out_of_memory", "poison_job"}


class FailureKind(StrEnum):
    """In which way an attempt ended without a result."""

    INVALID_INPUT = "invalid_input"  # found late: only a worker could see it
    ENGINE_ERROR = "engine_error"  # the engine raised, or its file failed the self-check
    OUT_OF_MEMORY = "out_of_memory"
    CRASH = "crash"  # a rank died, or a collective or a device failed
    AGENT_LOST = "agent_lost"  # the lease ran out
    UPLOAD = "upload"  # the store refused five times in a row
    PREEMPTED = "preempted"  # drain
    DEADLINE = "deadline"  # the attempt took longer than it may
    INTERNAL = "internal"  # a defect of the farm itself


@dataclass(frozen=True)
class Failure:
    """How an attempt ended.

    `message` is shown to the user, so it holds no path, host or exception text (only INVALID_INPUT needs
    one); `detail` is for operators: exception text, log tail, exit codes. `roomier_profile` is where a job
    that ran out of memory may run instead (`Profiles.roomier`), if there is such a place. `neighbours` is how
    many other jobs ran in the same wave: any of them may be to blame for a crash.
    """

    kind: FailureKind
    message: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    roomier_profile: str | None = None
    neighbours: int = 0


@dataclass(frozen=True)
class Action:
    """What to do: the next state, the error if it is an end, the wait if it is not, and columns to set."""

    to: State
    error: dict[str, Any] | None = None
    delay_s: float = 0.0
    columns: dict[str, Any] = field(default_factory=dict)


def error_of(code: str, message: str | None = None) -> dict[str, Any]:
    """Return what `job.error` holds for a code: a safe sentence, and whether a retry may help."""
    return {"code": code, "message": message or _MESSAGES[code], "retryable": code in _WORTH_A_RETRY}


def decide(failure: Failure, job: Job, *, rules: Rules = DEFAULT_RULES, jitter: float = 0.0) -> Action:
    """Return what becomes of a job, read while it was active, after this failure.

    Args:
        failure: How the attempt ended.
        job: The row before the failure; its counters do not include it.
        rules: Holds the cap on lease losses.
        jitter: -1 to 1, spreads the waits by MAX_JITTER at most.
    """
    if job.cancel_requested_at is not None:
        return Action(State.CANCELED, error_of("canceled"))
    return _TABLE[failure.kind](_Case(failure, job, rules, 1 + MAX_JITTER * jitter))


@dataclass(frozen=True)
class _Case:
    failure: Failure
    job: Job
    rules: Rules
    spread: float


def _engine_error(case: _Case) -> Action:
    columns = {"engine_errors": case.job.engine_errors + 1, "avoid_group": case.job.group_id}
    if case.job.engine_errors >= MAX_ENGINE_ERRORS:
        return _fail("engine_error", columns=columns)
    return _requeue_or_fail(case.job, "engine_error", columns=columns)


def _out_of_memory(case: _Case) -> Action:
    if case.failure.roomier_profile is None:
        return _fail("out_of_memory")
    return _requeue_or_fail(case.job, "out_of_memory", columns={"profile": case.failure.roomier_profile})


def _crash(case: _Case) -> Action:
    if case.failure.neighbours:
        return _agent_lost(case)  # nobody knows yet whose crash it was
    job = case.job
    crashes = job.crash_count + 1
    groups = sorted({*job.crash_groups, job.group_id or ""})
    columns = {"crash_count": crashes, "crash_groups": groups}
    if crashes >= POISON_CRASHES or len(groups) >= POISON_CRASHES_APART:
        return _fail("poison_job", columns=columns)
    delay_s = _backoff_s(job.crash_count, case.spread)
    return _requeue_or_fail(job, "worker_crashed", columns=columns, delay_s=delay_s)


def _agent_lost(case: _Case) -> Action:
    job = case.job
    columns = {"infra_losses": job.infra_losses + 1}
    if case.failure.neighbours:
        columns["crashed_waves"] = job.crashed_waves + 1
    if job.infra_losses >= case.rules.max_infra_losses:
        return _fail("worker_lost", columns=columns)
    delay_s = _backoff_s(job.infra_losses - 1, case.spread) if job.infra_losses else 0.0
    return Action(State.QUEUED, delay_s=delay_s, columns=columns)


def _upload(case: _Case) -> Action:
    job = case.job
    columns = {"upload_failures": job.upload_failures + 1}
    if job.upload_failures >= MAX_UPLOAD_FAILURES:
        return _fail("upload_failed", columns=columns)
    delay_s = _backoff_s(job.upload_failures, case.spread)
    return _requeue_or_fail(job, "upload_failed", columns=columns, delay_s=delay_s)


def _preempted(case: _Case) -> Action:
    return Action(State.QUEUED, columns={"preemptions": case.job.preemptions + 1})


def _internal(case: _Case) -> Action:
    delay_s = _backoff_s(case.job.attempts_used - 1, case.spread)
    return _requeue_or_fail(case.job, "internal", columns={}, delay_s=delay_s)


_TABLE: dict[FailureKind, Callable[[_Case], Action]] = {
    FailureKind.INVALID_INPUT: lambda case: _fail("invalid_input", case.failure.message),
    FailureKind.ENGINE_ERROR: _engine_error,
    FailureKind.OUT_OF_MEMORY: _out_of_memory,
    FailureKind.CRASH: _crash,
    FailureKind.AGENT_LOST: _agent_lost,
    FailureKind.UPLOAD: _upload,
    FailureKind.PREEMPTED: _preempted,
    FailureKind.DEADLINE: lambda _: _fail("deadline_exceeded"),
    FailureKind.INTERNAL: _internal,
}


def _fail(code: str, message: str | None = None, *, columns: dict[str, Any] | None = None) -> Action:
    return Action(State.FAILED, error_of(code, message), columns=columns or {})


def _requeue_or_fail(job: Job, code: str, *, columns: dict[str, Any], delay_s: float = 0.0) -> Action:
    """Queue again while the user's budget lasts; the attempt that just ended is already counted."""
    if job.attempts_used >= job.max_attempts:
        return _fail(code, columns=columns)
    return Action(State.QUEUED, delay_s=delay_s, columns=columns)


def _backoff_s(earlier: int, spread: float) -> float:
    """Return 10 s, doubled for each earlier failure of this kind up to a cap, and spread."""
    doubled: float = BACKOFF_S * 2 ** min(max(earlier, 0), 10)
    return min(doubled, MAX_BACKOFF_S) * spread
