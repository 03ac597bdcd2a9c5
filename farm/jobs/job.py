"""The rows of a job as frozen dataclasses: what everything above the SQL passes around.

The fields of `Job`, `Asset`, `Attempt` and `Event` are the columns of their tables, one to one (a test
compares them); what a column means is said in `farm/db/tables.py`. `Rules` carries what settings may change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from farm.jobs.states import ACTIVE, TERMINAL, State


@dataclass(frozen=True)
class Rules:
    """The limits that hold where an account or a request says nothing else; made by `Settings.rules()`."""

    max_queued: int = 100
    max_running: int = 8
    gpu_s_per_day: int | None = None
    max_infra_losses: int = 5
    lease_s: float = 30.0


DEFAULT_RULES = Rules()
# One point of priority is so much head start in the queue; that is also why low priority cannot starve.
PRIORITY_HEAD_START = timedelta(seconds=600)


@dataclass(frozen=True)
class Job:
    """One requested video, as its row was when it was read."""

    id: str
    account_id: str
    state: State
    phase: str | None
    profile: str
    requested_profile: str
    priority: int
    prompt: str
    params: dict[str, Any]
    contract_version: int
    wave_key: str
    input_asset_id: str | None
    seed: int
    steps: int
    step: int
    progress: int
    epoch: int
    attempts: int
    infra_losses: int
    preemptions: int
    crash_count: int
    engine_errors: int
    upload_failures: int
    crashed_waves: int
    crash_groups: list[str]
    max_attempts: int
    retry_count: int
    group_id: str | None
    avoid_group: str | None
    lease_until: datetime | None
    not_before: datetime
    queue_deadline: datetime
    expires_in_s: int
    exec_timeout_s: int
    attempt_deadline: datetime | None
    cancel_requested_at: datetime | None
    cancel_by: str | None
    deleted_at: datetime | None
    error: dict[str, Any] | None
    result: dict[str, Any] | None
    notices: list[str]
    metadata: dict[str, str]
    user_tag: str | None
    retention_s: int
    seq: int
    rank_at: datetime
    created_at: datetime
    queued_at: datetime
    started_at: datetime | None
    running_at: datetime | None
    uploading_at: datetime | None
    finished_at: datetime | None
    batch_id: str | None = None
    reuse: str = "off"
    reuse_key: str | None = None
    gpus: int = 1
    gpu_s_reserved: int = 0
    traceparent: str | None = None

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> "Job":
        """Build a job from a full row of the table; columns of a later release are left out."""
        known = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "state": State(row["state"])})

    @property
    def is_active(self) -> bool:
        """Tell whether a group holds it."""
        return self.state in ACTIVE

    @property
    def is_finished(self) -> bool:
        """Tell whether it has reached its end."""
        return self.state in TERMINAL

    @property
    def attempts_used(self) -> int:
        """Return how much of `max_attempts` is used: losses and preemptions are not the user's."""
        return self.attempts - self.infra_losses - self.preemptions


@dataclass(frozen=True)
class Asset:
    """One object in the store that a user may see."""

    id: str
    account_id: str
    kind: str
    job_id: str | None
    epoch: int | None
    key: str
    bytes: int
    sha256: str
    media_type: str
    width: int | None
    height: int | None
    created_at: datetime
    expires_at: datetime | None
    deleted_at: datetime | None


@dataclass(frozen=True)
class NewAsset:
    """An object that was stored and verified, not yet named by a row."""

    kind: str
    key: str
    bytes: int
    sha256: str
    media_type: str
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True)
class Attempt:
    """One claim of a job by a group."""

    job_id: str
    epoch: int
    group_id: str
    worker_boot_id: str
    profile: str
    queued_at: datetime
    started_at: datetime
    running_at: datetime | None
    uploading_at: datetime | None
    ended_at: datetime | None
    outcome: str | None
    error: dict[str, Any] | None
    timings: dict[str, Any] | None
    peak_memory_mb: int | None
    measured: dict[str, Any] | None
    wave_id: str | None
    cleaned_at: datetime | None


@dataclass(frozen=True)
class Event:
    """One line of a job's timeline."""

    job_id: str
    seq: int
    type: str
    at: datetime
    epoch: int
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claimed:
    """A job that this group now holds, until `lease_s` after its last heartbeat."""

    job: Job
    lease_s: float

    @property
    def epoch(self) -> int:
        """Return the fencing token that every later write must name."""
        return self.job.epoch


@dataclass(frozen=True)
class Beat:
    """What an accepted heartbeat tells the agent."""

    lease_s: float
    cancel_requested: bool
    deadline_passed: bool
    wanted_state: str | None
