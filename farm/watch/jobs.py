"""Jobs of all accounts: searched, waiting in order, and one with all of its history.

Ids are in order of time, so pages go by id: newest first without an index of its own. A job that its owner
deleted is found by its id alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, or_, select

from farm.clock import db_now
from farm.db.tables import account, asset, job, job_attempt, job_event, webhook_delivery, webhook_message
from farm.errors import NotFoundError
from farm.ids import is_id
from farm.jobs.job import Asset, Attempt, Event, Job
from farm.jobs.states import State
from farm.webhooks.delivery_log import DeliveryRow

MAX_QUEUE = 200
MAX_BULK = 500


@dataclass(frozen=True)
class JobSearch:
    """What is looked for; empty members match everything."""

    text: str = ""  # an id, or words of the prompt
    account: str = ""  # its name or id
    states: Sequence[State] = ()
    error_code: str = ""
    profile: str = ""
    group: str = ""
    since: datetime | None = None
    until: datetime | None = None
    before_id: str = ""
    limit: int = 50


@dataclass(frozen=True)
class Row:
    """A job and the name of its account."""

    job: Job
    account: str


@dataclass(frozen=True)
class Found:
    """A page of jobs, newest first."""

    rows: list[Row]
    has_more: bool


@dataclass(frozen=True)
class Whole:
    """A job with everything that belongs to it."""

    job: Job
    account: str
    events: list[Event]
    attempts: list[Attempt]
    assets: dict[str, Asset]
    image: Asset | None
    deliveries: list[DeliveryRow]
    at: datetime  # the database's clock


def search(conn: Connection, wanted: JobSearch) -> Found:
    """Return one page of the jobs that match."""
    query = _matching(wanted)
    if wanted.before_id:
        query = query.where(job.c.id < wanted.before_id)
    rows = conn.execute(query.order_by(job.c.id.desc()).limit(wanted.limit + 1)).mappings().all()
    return Found([_row(row) for row in rows[: wanted.limit]], len(rows) > wanted.limit)


def matching_ids(conn: Connection, wanted: JobSearch) -> list[tuple[str, str]]:
    """Return (job, account) of what matches, for a change of many; one more than may be changed at once."""
    query = _matching(replace(wanted, before_id=""), job.c.id, job.c.account_id)
    rows = conn.execute(query.order_by(job.c.id.desc()).limit(MAX_BULK + 1)).all()
    return [(row[0], row[1]) for row in rows]


def waiting(conn: Connection, profile: str, limit: int = MAX_QUEUE) -> list[Row]:
    """Return the jobs that wait for a profile, next one first."""
    query = _with_account().where(job.c.state == State.QUEUED, job.c.profile == profile)
    rows = conn.execute(query.order_by(job.c.rank_at, job.c.id).limit(limit)).mappings()
    return [_row(row) for row in rows]


def waiting_ids(conn: Connection, profile: str) -> list[tuple[str, str]]:
    """Return (job, account) of everything that waits for a profile, next one first."""
    query = select(job.c.id, job.c.account_id).where(job.c.state == State.QUEUED, job.c.profile == profile)
    return [(row[0], row[1]) for row in conn.execute(query.order_by(job.c.rank_at, job.c.id)).all()]


def owner_of(conn: Connection, job_id: str) -> str:
    """Return the account of a job, for the functions of `farm/jobs/control.py`.

    Raises:
        NotFoundError: There is none of this id.
    """
    found = conn.execute(select(job.c.account_id).where(job.c.id == job_id)).scalar_one_or_none()
    if found is None:
        raise NotFoundError(job_id)
    owner: str = found
    return owner


def whole(conn: Connection, job_id: str) -> Whole:
    """Return one job, also a deleted one, with its history.

    Raises:
        NotFoundError: There is none of this id.
    """
    row = (
        conn.execute(_with_account(db_now().label("read_at")).where(job.c.id == job_id))
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise NotFoundError(job_id)
    found = _row(row)
    events = select(job_event).where(job_event.c.job_id == job_id).order_by(job_event.c.seq)
    attempts = select(job_attempt).where(job_attempt.c.job_id == job_id).order_by(job_attempt.c.epoch)
    assets = select(asset).where(or_(asset.c.job_id == job_id, asset.c.id == found.job.input_asset_id))
    by_kind = {}
    for each in conn.execute(assets).mappings():
        by_kind[each["kind"]] = Asset(**{name: each[name] for name in Asset.__dataclass_fields__})
    return Whole(
        job=found.job,
        account=found.account,
        events=[_event(each) for each in conn.execute(events).mappings()],
        attempts=[_attempt(each) for each in conn.execute(attempts).mappings()],
        assets=by_kind,
        image=by_kind.pop("input", None),
        deliveries=_deliveries(conn, job_id),
        at=row["read_at"],
    )


def _deliveries(conn: Connection, job_id: str) -> list[DeliveryRow]:
    columns = [
        webhook_delivery.c[name]
        for name in (
            "id",
            "endpoint_id",
            "message_id",
            "status",
            "attempts",
            "max_attempts",
            "next_attempt_at",
            "last_status",
            "last_error",
        )
    ]
    query = (
        select(*columns, webhook_message.c.type, webhook_message.c.job_id, webhook_message.c.created_at)
        .join(webhook_message, webhook_message.c.id == webhook_delivery.c.message_id)
        .where(webhook_message.c.job_id == job_id)
        .order_by(webhook_delivery.c.id.desc())
        .limit(50)
    )
    return [DeliveryRow(**row) for row in conn.execute(query).mappings()]


def _with_account(*more: Any) -> Select[Any]:
    return select(job, account.c.name.label("account_name"), *more).join(
        account, account.c.id == job.c.account_id
    )


def _matching(wanted: JobSearch, *columns: Any) -> Select[Any]:
    base = select(*columns).join(account, account.c.id == job.c.account_id) if columns else _with_account()
    return base.where(*_conditions(wanted))


def _conditions(wanted: JobSearch) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if is_id(wanted.text, "video"):
        conditions.append(job.c.id == wanted.text)
    else:
        conditions.append(job.c.deleted_at.is_(None))
        if wanted.text:
            conditions.append(func.strpos(func.lower(job.c.prompt), wanted.text.lower()) > 0)
    if wanted.account:
        conditions.append((account.c.name == wanted.account) | (account.c.id == wanted.account))
    if wanted.states:
        conditions.append(job.c.state.in_(wanted.states))
    if wanted.error_code:
        conditions.append(job.c.error["code"].as_string() == wanted.error_code)
    if wanted.profile:
        conditions.append(job.c.profile == wanted.profile)
    if wanted.group:
        conditions.append(job.c.group_id == wanted.group)
    if wanted.since is not None:
        conditions.append(job.c.created_at >= wanted.since)
    if wanted.until is not None:
        conditions.append(job.c.created_at < wanted.until)
    return conditions


def _row(row: Any) -> Row:
    return Row(Job.from_row(row), row["account_name"])


def _event(row: Any) -> Event:
    return Event(**{name: row[name] for name in Event.__dataclass_fields__})


def _attempt(row: Any) -> Attempt:
    return Attempt(**{name: row[name] for name in Attempt.__dataclass_fields__})
