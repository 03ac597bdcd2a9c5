"""Reads of jobs: one, many by page, their objects and history. Nothing here writes or locks.

A job that was deleted, or that belongs to another account, does not exist for these functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, Select, bindparam, select, tuple_

from farm.db.tables import asset, job, job_attempt, job_event
from farm.errors import NotFoundError
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
    batch_id: str | None = None
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
    row = conn.execute(_ONE, {"account": account_id, "id": job_id}).mappings().one_or_none()
    if row is None:
        raise NotFoundError(job_id)
    return Job.from_row(row)


def list_jobs(conn: Connection, account_id: str, query: ListQuery) -> Page:
    """Return one page by keyset on (created_at, id): no skips or repeats while rows are added.

    Raises:
        NotFoundError: `after` is not a job of this account.
    """
    position = tuple_(job.c.created_at, job.c.id)
    wanted = _visible(account_id).where(*_filters(query))
    if query.after is not None:
        last = get_job(conn, account_id, query.after)
        bound = tuple_(last.created_at, last.id)
        wanted = wanted.where(position > bound if query.is_ascending else position < bound)
    if query.is_ascending:
        wanted = wanted.order_by(job.c.created_at, job.c.id)
    else:
        wanted = wanted.order_by(job.c.created_at.desc(), job.c.id.desc())
    rows = conn.execute(wanted.limit(query.limit + 1)).mappings().all()
    return Page([Job.from_row(row) for row in rows[: query.limit]], len(rows) > query.limit)


def get_asset(conn: Connection, account_id: str, job_id: str, kind: str) -> Asset | None:
    """Return the object of a kind, also one that has expired (`deleted_at`); None if there never was one.

    Raises:
        NotFoundError: The job is unknown, deleted, or of another account.
    """
    get_job(conn, account_id, job_id)
    found = select(asset).where(asset.c.job_id == job_id, asset.c.kind == kind)
    return _asset_or_none(conn, found)


def assets_by_job(conn: Connection, account_id: str, job_ids: Sequence[str], kind: str) -> dict[str, Asset]:
    """Return the objects of a kind of several jobs of this account, by job; for pages."""
    found = select(asset).where(asset.c.account_id == account_id, asset.c.kind == kind)
    rows = conn.execute(found.where(asset.c.job_id.in_(job_ids))).mappings()
    return {row["job_id"]: Asset(**row) for row in rows}


def get_input(conn: Connection, wanted: Job) -> Asset | None:
    """Return the input image of a job, if it has one."""
    return _asset_or_none(conn, select(asset).where(asset.c.id == wanted.input_asset_id))


def timeline(conn: Connection, account_id: str, job_id: str) -> Timeline:
    """Return all events and attempts of a job of this account.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
    """
    get_job(conn, account_id, job_id)
    events = select(job_event).where(job_event.c.job_id == job_id).order_by(job_event.c.seq)
    attempts = select(job_attempt).where(job_attempt.c.job_id == job_id).order_by(job_attempt.c.epoch)
    return Timeline(
        [Event(**row) for row in conn.execute(events).mappings()],
        [Attempt(**row) for row in conn.execute(attempts).mappings()],
    )


def _visible(account_id: str | BindParameter[str]) -> Select[Any]:
    return select(job).where(job.c.account_id == account_id, job.c.deleted_at.is_(None))


# Built once: it is the statement of every poll.
_ONE = _visible(bindparam("account")).where(job.c.id == bindparam("id"))


def _filters(query: ListQuery) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if query.states:
        conditions.append(job.c.state.in_(query.states))
    if query.profile is not None:
        conditions.append(job.c.profile == query.profile)
    if query.batch_id is not None:
        conditions.append(job.c.batch_id == query.batch_id)
    if query.created_after is not None:
        conditions.append(job.c.created_at > query.created_after)
    if query.created_before is not None:
        conditions.append(job.c.created_at < query.created_before)
    if query.user_tag is not None:
        conditions.append(job.c.user_tag == query.user_tag)
    if query.metadata:
        conditions.append(job.c.metadata.contains(query.metadata))
    return conditions


def _asset_or_none(conn: Connection, query: Select[Any]) -> Asset | None:
    row = conn.execute(query).mappings().one_or_none()
    return None if row is None else Asset(**row)
