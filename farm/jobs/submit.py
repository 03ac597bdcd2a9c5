"""Accept a job: one transaction that makes the row and everything that must exist with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection

from farm.jobs.job import DEFAULT_RULES, Job, NewAsset, Rules
from magi2.contract import GenerationRequest


@dataclass(frozen=True)
class JobWebhook:
    """An endpoint that hears of one job only; `sealed_secret` is `farm.secretbox.seal(...)` of its `whsec_` text."""

    url: str
    event_types: Sequence[str]
    sealed_secret: bytes


@dataclass(frozen=True)
class Submission:
    """A request that has passed every check; `input` is an image that is already in the store."""

    account_id: str
    request: GenerationRequest
    profile: str
    exec_timeout_s: int
    retention_s: int
    requested_profile: str = "auto"
    priority: int = 0
    expires_in_s: int = 86_400
    max_attempts: int = 3
    input: NewAsset | None = None
    webhook: JobWebhook | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    user_tag: str | None = None
    notices: Sequence[str] = ()


def submit(conn: Connection, submission: Submission, *, rules: Rules = DEFAULT_RULES) -> Job:
    """Queue a job in the caller's transaction.

    Raises:
        QueueFullError: The account has `max_queued` waiting jobs.
        NotFoundError: There is no such active account.
    """
    ...
