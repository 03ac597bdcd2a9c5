"""Webhook messages: which events of a job are told to whom, and the body they are told in.

A message and its deliveries are written in the transaction of the state change itself, so there is never one
without the other. Bodies are thin: no prompt, no link (the sender adds fresh links). Nothing is sent from
here.
"""

import json
from typing import Any

from sqlalchemy import Connection, any_, insert, literal, or_, select

from farm.db.tables import webhook_delivery, webhook_endpoint, webhook_message
from farm.ids import new_id
from farm.jobs.job import Event, Job
from farm.jobs.states import State, openai_status

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
EVENT_TYPES = tuple(_TYPES.values())
MAX_BODY_BYTES = 18_000  # of the 20 KB that a receiver is promised; the links of the sender need the rest
DEFAULT_EVENT_TYPES = ("video.completed", "video.failed", "video.canceled", "video.expired")


def write_messages(conn: Connection, job: Job, event: Event) -> None:
    """Write the message of an event and a delivery to each endpoint that subscribed to it, if any did."""
    kind = _TYPES.get(event.type)
    if kind is None:
        return
    endpoints = _subscribed(conn, job, kind)
    if not endpoints:
        return
    message_id = new_id("evt")
    message = {
        "id": message_id,
        "account_id": job.account_id,
        "type": kind,
        "job_id": job.id,
        "seq": event.seq,
        "body": message_body(message_id, kind, job, event),
        "created_at": event.at,
    }
    conn.execute(insert(webhook_message).values(**message))
    rows = [
        {"id": new_id("whd"), "message_id": message_id, "endpoint_id": endpoint_id}
        for endpoint_id in endpoints
    ]
    conn.execute(insert(webhook_delivery), rows)


def message_body(message_id: str, kind: str, job: Job, event: Event) -> dict[str, Any]:
    """Return the thin body of an event; `data.seq` lets a receiver order what arrives out of order."""
    body: dict[str, Any] = {
        "id": message_id,
        "object": "event",
        "type": kind,
        "created_at": int(event.at.timestamp()),
        "timestamp": event.at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "data": {
            "id": job.id,
            "object": "video",
            "state": str(job.state),
            "status": openai_status(State(job.state)),
            "seq": event.seq,
            "error": job.error,
            "metadata": job.metadata,
        },
    }
    if len(json.dumps(body, ensure_ascii=False).encode()) > MAX_BODY_BYTES:
        body["data"] |= {"metadata": {}, "is_metadata_omitted": True}
    return body


def _subscribed(conn: Connection, job: Job, kind: str) -> list[str]:
    whole_account = (webhook_endpoint.c.account_id == job.account_id) & webhook_endpoint.c.job_id.is_(None)
    query = select(webhook_endpoint.c.id).where(
        or_(whole_account, webhook_endpoint.c.job_id == job.id),
        webhook_endpoint.c.enabled,
        literal(kind) == any_(webhook_endpoint.c.event_types),
    )
    return list(conn.execute(query).scalars())
