"""Webhook messages: which events are told to whom, and what is kept to tell them.

A message and its deliveries are written in the transaction of the state change itself, so there is never one
without the other. Bodies are thin: no prompt, no link (the sender adds fresh links); where an endpoint asked
for the whole object, that is kept beside the body as it was at the event. Nothing is sent from here.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Select, any_, bindparam, insert, literal, or_, select

from farm.clock import db_now
from farm.db.tables import job as job_table
from farm.db.tables import webhook_delivery, webhook_endpoint, webhook_message
from farm.ids import new_id
from farm.jobs.job import Event, Job
from farm.jobs.queries import assets_by_job
from farm.jobs.states import State, openai_status
from farm.jobs.video_object import rfc3339, video_object

# Event of a job -> type of the message; events that are not here are told to nobody.
_TYPES = {
    "queued": "video.queued",
    "starting": "video.started",
    "succeeded": "video.completed",
    "failed": "video.failed",
    "canceled": "video.canceled",
    "expired": "video.expired",
    "deleted": "video.deleted",
}
PROGRESS = "video.progress"
TEST = "webhook.test"
BATCH_COMPLETED = "video.batch.completed"
EVENT_TYPES = (*_TYPES.values(), PROGRESS, BATCH_COMPLETED, TEST)
DEFAULT_EVENT_TYPES = ("video.completed", "video.failed", "video.canceled", "video.expired")

MAX_BODY_BYTES = 18_000  # of the 20 KB that a receiver is promised; the links of the sender need the rest
MAX_PROMPT_CHARS = 1_000  # of a whole object that is too large
THIN, FULL = "thin", "full"
# Tries of a message: ten by the schedule; progress is stale soon, and of a test the first answer counts.
MAX_ATTEMPTS = 10
PROGRESS_ATTEMPTS = 2
TEST_ATTEMPTS = 1
PROGRESS_EVERY_S = 10

_THIN_MEMBERS = ("id", "object", "state", "status", "error", "metadata")
# What was deleted is not shown again.
_THIN_ONLY = frozenset({"video.deleted"})
_SAMPLE_STATES = {
    **{kind: State(state) for state, kind in _TYPES.items() if state != "deleted"},
    "video.deleted": State.CANCELED,
    PROGRESS: State.RUNNING,
}
_PROGRESS_DUE = sa.text(
    """
    SELECT e.id FROM job j
    JOIN webhook_endpoint e ON e.job_id = j.id
      OR (e.account_id = j.account_id AND e.job_id IS NULL AND e.batch_id IS NULL)
    WHERE j.id = :job_id AND e.enabled AND :kind = ANY(e.event_types) AND NOT EXISTS (
        SELECT FROM webhook_message m WHERE m.job_id = j.id AND m.type = :kind
        AND m.created_at > clock_timestamp() - make_interval(secs => :every_s))
    """
)
_DROP_STALE_PROGRESS = sa.text(
    """
    UPDATE webhook_delivery SET status = 'canceled' WHERE id IN (
        SELECT d.id FROM webhook_delivery d JOIN webhook_message m ON m.id = d.message_id
        WHERE m.job_id = :job_id AND m.type = :kind AND d.status = 'pending' AND d.attempts = 0
        FOR UPDATE OF d SKIP LOCKED)
    """
)


def write_messages(conn: Connection, job: Job, event: Event) -> None:
    """Write the message of an event and a delivery to each endpoint that subscribed to it, if any did."""
    kind = _TYPES.get(event.type)
    if kind is None:
        return
    endpoints = _subscribed(conn, job, kind)
    if not endpoints:
        return
    message_id = new_id("evt")
    row = {
        "id": message_id,
        "account_id": job.account_id,
        "type": kind,
        "job_id": job.id,
        "seq": event.seq,
        "body": message_body(message_id, kind, job, event),
        "created_at": event.at,
    }
    if FULL in endpoints.values() and kind not in _THIN_ONLY:
        row["full_data"] = _whole(conn, job, event.seq)
    _write(conn, row, list(endpoints), MAX_ATTEMPTS)


def write_progress(conn: Connection, job_id: str) -> None:
    """Tell those who asked for it how far a job is, unless that was done in the last ten seconds.

    It takes the place of an older report that is still waiting, and is tried at most twice.
    """
    values = {"job_id": job_id, "kind": PROGRESS, "every_s": PROGRESS_EVERY_S}
    endpoints = conn.execute(_PROGRESS_DUE, values).scalars().all()
    if not endpoints:
        return
    conn.execute(_DROP_STALE_PROGRESS, {"job_id": job_id, "kind": PROGRESS})
    job, at = _job_now(conn, job_id)
    message_id = new_id("evt")
    data = _thin(job, job.seq) | {
        "phase": job.phase,
        "step": job.step,
        "total_steps": job.steps,
        "progress": job.progress,
    }
    row = {
        "id": message_id,
        "account_id": job.account_id,
        "type": PROGRESS,
        "job_id": job.id,
        "body": _body(message_id, PROGRESS, at, data),
        "created_at": at,
    }
    _write(conn, row, endpoints, PROGRESS_ATTEMPTS)


def write_batch_message(
    conn: Connection, account_id: str, batch_id: str, at: datetime, data: dict[str, Any]
) -> None:
    """Tell the endpoints of the account that asked for it, and the batch's own, that all have ended."""
    query = select(webhook_endpoint.c.id).where(
        webhook_endpoint.c.account_id == account_id,
        webhook_endpoint.c.job_id.is_(None),
        or_(webhook_endpoint.c.batch_id.is_(None), webhook_endpoint.c.batch_id == batch_id),
        webhook_endpoint.c.enabled,
        literal(BATCH_COMPLETED) == any_(webhook_endpoint.c.event_types),
    )
    endpoints = conn.execute(query).scalars().all()
    if not endpoints:
        return
    message_id = new_id("evt")
    row = {
        "id": message_id,
        "account_id": account_id,
        "type": BATCH_COMPLETED,
        "body": _body(message_id, BATCH_COMPLETED, at, data),
        "created_at": at,
    }
    _write(conn, row, endpoints, MAX_ATTEMPTS)


def write_test(conn: Connection, account_id: str, endpoint_id: str, kind: str) -> str:
    """Write a sample message to one endpoint, first in its line and tried once; return the delivery's id."""
    at: datetime = conn.execute(select(db_now())).scalar_one()
    message_id = new_id("evt")
    row = {
        "id": message_id,
        "account_id": account_id,
        "type": kind,
        "body": _body(message_id, kind, at, _sample(kind, endpoint_id)),
        "created_at": at,
    }
    _write(conn, row, [endpoint_id], TEST_ATTEMPTS)
    # Somebody waits for the answer; what piled up can wait a little longer.
    first = sa.update(webhook_delivery).where(webhook_delivery.c.message_id == message_id)
    first = first.values(next_attempt_at=sa.func.now() - sa.text("interval '1 year'"))
    delivery_id: str = conn.execute(first.returning(webhook_delivery.c.id)).scalar_one()
    return delivery_id


def message_body(message_id: str, kind: str, job: Job, event: Event) -> dict[str, Any]:
    """Return the thin body of an event."""
    return _body(message_id, kind, event.at, _thin(job, event.seq))


def _body(message_id: str, kind: str, at: datetime, data: dict[str, Any]) -> dict[str, Any]:
    """Return a body that holds the data, without its metadata where they would make it too large."""
    body = {
        "id": message_id,
        "object": "event",
        "type": kind,
        "created_at": int(at.timestamp()),
        "timestamp": rfc3339(at),
        "data": data,
    }
    if _num_bytes(body) > MAX_BODY_BYTES:
        body["data"] = data | {"metadata": {}, "is_metadata_omitted": True}
    return body


def _write(conn: Connection, row: dict[str, Any], endpoint_ids: Sequence[str], max_attempts: int) -> None:
    conn.execute(insert(webhook_message).values(**row))
    deliveries = [
        {
            "id": new_id("whd"),
            "message_id": row["id"],
            "endpoint_id": endpoint_id,
            "max_attempts": max_attempts,
        }
        for endpoint_id in endpoint_ids
    ]
    conn.execute(insert(webhook_delivery), deliveries)


def hearers(account_id: Any, job_id: Any, event_type: str) -> Select[tuple[str, str]]:
    """Select the endpoints that want to hear of an event, for statements that ask whether there are any.

    Ids may be values or parameters.
    """
    return _hearers(account_id, job_id, literal(_TYPES[event_type]))


def _hearers(account_id: Any, job_id: Any, kind: ColumnElement[str]) -> Select[tuple[str, str]]:
    whole_account = (
        (webhook_endpoint.c.account_id == account_id)
        & webhook_endpoint.c.job_id.is_(None)
        & webhook_endpoint.c.batch_id.is_(None)
    )
    return select(webhook_endpoint.c.id, webhook_endpoint.c.payload_mode).where(
        or_(whole_account, webhook_endpoint.c.job_id == job_id),
        webhook_endpoint.c.enabled,
        kind == any_(webhook_endpoint.c.event_types),
    )


_HEARERS = _hearers(bindparam("account_id"), bindparam("job_id"), bindparam("kind"))


def _subscribed(conn: Connection, job: Job, kind: str) -> dict[str, str]:
    """Return the endpoints that want it, each with its payload mode."""
    asked = {"account_id": job.account_id, "job_id": job.id, "kind": kind}
    return {row.id: row.payload_mode for row in conn.execute(_HEARERS, asked)}


def _thin(job: Job, seq: int) -> dict[str, Any]:
    """Return what every receiver gets; `seq` lets it order what arrives out of order."""
    whole = video_object(job)
    return {name: whole[name] for name in _THIN_MEMBERS} | {"seq": seq}


def _whole(conn: Connection, job: Job, seq: int) -> dict[str, Any]:
    """Return the whole object, cut where it would not fit into a body."""
    assets = assets_by_job(conn, job.account_id, [job.id], "video") if job.state is State.SUCCEEDED else {}
    data = video_object(job, assets.get(job.id)) | {"seq": seq}
    if _num_bytes(data) > MAX_BODY_BYTES:
        data |= {"prompt": job.prompt[:MAX_PROMPT_CHARS], "is_prompt_truncated": True}
    if _num_bytes(data) > MAX_BODY_BYTES:
        data |= {"metadata": {}, "is_metadata_omitted": True}
    return data


def _sample(kind: str, endpoint_id: str) -> dict[str, Any]:
    if kind == TEST:
        return {"id": endpoint_id, "object": "webhook_endpoint", "is_test": True}
    if kind == BATCH_COMPLETED:
        counts = {"queued": 0, "in_progress": 0, "completed": 1, "failed": 0, "total": 1}
        sample = {"id": new_id("batch"), "object": "video.batch", "counts": counts, "metadata": {}}
        return sample | {"is_test": True}
    state = _SAMPLE_STATES[kind]
    return {
        "id": new_id("video"),
        "object": "video",
        "state": state.value,
        "status": openai_status(state),
        "error": None,
        "metadata": {},
        "seq": 1,
        "is_test": True,
    }


def _job_now(conn: Connection, job_id: str) -> tuple[Job, datetime]:
    query = select(job_table, db_now().label("now_at")).where(job_table.c.id == job_id)
    values = dict(conn.execute(query).mappings().one())
    at: datetime = values.pop("now_at")
    return Job.from_row(values), at


def _num_bytes(value: dict[str, Any]) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
