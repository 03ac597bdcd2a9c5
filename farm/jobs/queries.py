"""Reads of jobs: one, many by page, their history, their place in the queue. Nothing here writes or locks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection

from farm.jobs.job import Asset, Attempt, Event, Job
from farm.jobs.states import State


@dataclass(frozen=True)
class ListQuery:
    """A page of an account's jobs, newest first unless asked otherwise; empty filters match everything."""

    after: str | None = None
    limit: int = 20
    is_ascending: bool = False
    states: Sequence[State] = ()
    profile: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    user_tag: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """Jobs in order, and whether more follow."""

    jobs: list[Job]
    has_more: bool


@dataclass(frozen=True)
class Timeline:
    """Everything that happened to a job."""

    events: list[Event]
    attempts: list[Attempt]


def get_job(conn: Connection, account_id: str, job_id: str) -> Job:
    """Return a job of this account.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
    """
    ...


def list_jobs(conn: Connection, account_id: str, query: ListQuery) -> Page:
    """Return one page by keyset on (created_at, id): no skips or repeats while rows are added.

    Raises:
        NotFoundError: `after` is not a job of this account.
    """
    ...


def get_asset(conn: Connection, account_id: str, job_id: str, kind: str) -> Asset | None:
    """Return the public object of a kind, also when it has expired (`deleted_at`); None if there is none."""
    ...


def get_input(conn: Connection, job: Job) -> Asset | None:
    """Return the input image of a job."""
    ...


def timeline(conn: Connection, account_id: str, job_id: str) -> Timeline:
    """Return all events and attempts of a job of this account.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
    """
    ...


def queue_position(conn: Connection, job: Job) -> int | None:
    """Return an estimate of the place in the queue of its profile, 1 = next; None when not queued."""
    ...


def eta_s(conn: Connection, job: Job) -> float | None:
    """Return the seconds until the end by the profile's measured times; None before it has finished a clip."""
    ...
