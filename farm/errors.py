"""The errors that a caller of the farm may see: a stable code, an HTTP status and a safe sentence.

One tree; `api/problems.py` renders it, the command line prints it. Messages say what was given, what is
allowed and what to change, and never hold a path, a host, SQL or a secret. Failures of a job are not here:
they are data (`farm/jobs/policy.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorDetail:
    """One problem of a request: where it is, what it is, its code."""

    loc: str
    msg: str
    type: str


class FarmError(Exception):
    """Something that the caller can understand and mostly mend."""

    def __init__(
        self,
        code: str,
        http_status: int,
        message: str,
        errors: Sequence[ErrorDetail] = (),
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.http_status = http_status
        self.message = message
        self.errors = list(errors)
        self.retry_after_s = retry_after_s
        # More members of the answer's body, for a client that wants to go on from here.
        self.members: dict[str, str] = {}


class SettingsError(FarmError):
    """The configuration cannot be used; the process must not start."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_settings", 500, message)


class InvalidFieldError(FarmError):
    """A member of the request has a value that is not allowed."""

    def __init__(self, field: str, message: str, *, code: str = "invalid_field") -> None:
        super().__init__(code, 422, message, [ErrorDetail(loc=field, msg=message, type=code)])


class AuthenticationError(FarmError):
    """No key, or one that opens nothing; why is not told."""

    def __init__(self, message: str = "the API key is missing, unknown, expired or revoked") -> None:
        super().__init__("invalid_api_key", 401, message)


class ScopeError(FarmError):
    """The key is good but may not do this."""

    def __init__(self, scope: str) -> None:
        super().__init__("insufficient_scope", 403, f"the API key lacks the scope {scope}")


class AddressError(FarmError):
    """The key is good but not from this address."""

    def __init__(self) -> None:
        super().__init__("ip_not_allowed", 403, "the API key may not be used from this address")


class NotFoundError(FarmError):
    """Unknown, deleted, or somebody else's: the three look alike."""

    def __init__(self, what: str) -> None:
        super().__init__("not_found", 404, f"{what} was not found")


class AlreadyFinishedError(FarmError):
    """The job has ended, so it cannot be changed any more."""

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__("already_finished", 409, f"{job_id} has already finished (state {state})")


class AlreadyStartedError(FarmError):
    """The job does not wait any more, so what may change only while it waits stays as it is."""

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(
            "already_started", 409, f"{job_id} has been started (state {state}); cancel it instead"
        )


class NotFinishedError(FarmError):
    """The job has no result (yet)."""

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__("not_finished", 409, f"{job_id} has no content (state {state})")
        self.members = {"state": str(state)}


class GroupGoneError(FarmError):
    """The agent of the group has left; nobody would obey."""

    def __init__(self, group_id: str, *, is_drained: bool = False) -> None:
        remedy = "take its drain back first" if is_drained else "start its worker again instead"
        message = f"group {group_id} is gone: its agent has left; {remedy}"
        super().__init__("group_gone", 409, message)


class ProfilePausedError(FarmError):
    """An operator has paused the profile."""

    def __init__(self, profile: str, reason: str | None) -> None:
        why = f" ({reason})" if reason else ""
        message = f"profile {profile} is paused{why}; ask for another profile, or wait until it is resumed"
        super().__init__("profile_paused", 409, message)


class ProfileFullError(FarmError):
    """As many jobs wait for the profile as an operator allows."""

    def __init__(self, profile: str, max_queued: int) -> None:
        message = (
            f"{max_queued} jobs are waiting for profile {profile}, which is all that may; "
            "wait, or ask for another profile"
        )
        super().__init__("queue_full", 429, message, retry_after_s=10)


class QuarantinedError(FarmError):
    """The job is not started again until an operator releases it."""

    def __init__(self, job_id: str) -> None:
        message = f"{job_id} is in quarantine; an operator must release it before it can be retried"
        super().__init__("not_retryable", 409, message)


class NotRetryableError(FarmError):
    """Only a failed, canceled or expired job can be queued again."""

    def __init__(self, job_id: str, state: str) -> None:
        message = f"{job_id} is {state}; only failed, canceled and expired jobs can be retried"
        super().__init__("not_retryable", 409, message)


class ContentExpiredError(FarmError):
    """The object was removed by retention."""

    def __init__(self, job_id: str) -> None:
        super().__init__("content_expired", 410, f"the content of {job_id} has expired; render it again")


class QueueFullError(FarmError):
    """The account has as many waiting jobs as it may have."""

    def __init__(self, max_queued: int) -> None:
        message = f"{max_queued} jobs are waiting already, which is all this account may have; wait or cancel"
        super().__init__("queue_full", 429, message, retry_after_s=10)


class QuotaExceededError(FarmError):
    """The account has used, or has promised to jobs that wait, all of the day's GPU-seconds."""

    def __init__(self, limit_s: int, left_s: int, wanted_s: int, retry_after_s: int) -> None:
        message = (
            f"about {wanted_s} GPU-seconds are needed; {left_s} of the account's {limit_s} a day are left; "
            "wait until the next day (UTC), or for jobs that end sooner than estimated"
        )
        super().__init__("quota_exceeded", 429, message, retry_after_s=retry_after_s)
