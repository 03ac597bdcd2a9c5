"""Accept a job: one transaction that makes the row and everything that must exist with it.

The caller has checked the request completely and stored the image; nothing here talks to anything but the
database, and nothing is published: the outbox row and its NOTIFY become visible with the commit.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, insert, literal, select
from sqlalchemy.dialects.postgresql import JSONB

from farm.accounts import reserve_queue_slot
from farm.assets import keep_image
from farm.clock import db_now
from farm.db.tables import asset, job, webhook_endpoint, webhook_secret
from farm.ids import new_id
from farm.jobs.job import DEFAULT_RULES, PRIORITY_HEAD_START, Job, NewAsset, Rules
from farm.jobs.states import State
from farm.jobs.transition import insert_job
from magi2.contract import CONTRACT_VERSION, GenerationRequest, wave_key


@dataclass(frozen=True)
class JobWebhook:
    """An endpoint that hears of one job only; its `whsec_` text is sealed by `farm.secretbox.seal`."""

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
    batch_id: str | None = None
    reuse: str = "off"
    gpus: int = 1
    wave_size: int = 1  # slots of the profile's layout
    traceparent: str | None = None
    gpu_s: int = 0  # the estimate that is kept free of the account's day

    def reuse_key(self) -> str:
        """Digest everything that decides what the clip looks like, but for the engine."""
        image = self.input.sha256 if self.input is not None else None
        parts = [self.profile, self.request.to_json(), image]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def submit(conn: Connection, submission: Submission, *, rules: Rules = DEFAULT_RULES) -> Job:
    """Queue a job in the caller's transaction.

    Raises:
        QueueFullError: The account has `max_queued` waiting jobs.
        QuotaExceededError: The day's GPU-seconds do not suffice.
        ProfilePausedError, ProfileFullError: An operator's wish; nothing of the transaction may be kept.
        NotFoundError: There is no such active account.
    """
    reserve_queue_slot(conn, submission.account_id, rules, gpu_s=submission.gpu_s)
    job_id = new_id("video")
    values = _columns(submission)
    if submission.input is not None:
        values["input_asset_id"] = keep_image(conn, submission.account_id, submission.input)
    if submission.webhook is not None:
        # Before the job (its foreign key is checked at commit), so that it hears of the first event too.
        add_endpoint(conn, submission.account_id, submission.webhook, job_id=job_id)
    return insert_job(
        conn,
        {"id": job_id, **values},
        head_start=submission.priority * PRIORITY_HEAD_START,
        queue_time=timedelta(seconds=submission.expires_in_s),
        wave_size=submission.wave_size,
        max_running=rules.max_running,
    )


def find_reusable(
    conn: Connection, account_id: str, reuse_key: str, engine: Mapping[str, Any] | None
) -> Job | None:
    """Return a finished job of the account with the same digest and engine, and its clip still there."""
    if not engine:
        return None
    has_clip = select(asset.c.id).where(
        asset.c.job_id == job.c.id,
        asset.c.kind == "video",
        asset.c.deleted_at.is_(None),
        asset.c.expires_at > db_now(),
    )
    query = (
        select(job)
        .where(job.c.account_id == account_id, job.c.reuse_key == reuse_key)
        .where(job.c.state == State.SUCCEEDED, job.c.deleted_at.is_(None), has_clip.exists())
        .where(job.c.result["engine"] == literal(dict(engine), JSONB))
        .order_by(job.c.finished_at.desc())
        .limit(1)
    )
    row = conn.execute(query).mappings().one_or_none()
    return None if row is None else Job.from_row(row)


def add_endpoint(
    conn: Connection,
    account_id: str,
    webhook: JobWebhook,
    *,
    job_id: str | None = None,
    batch_id: str | None = None,
) -> None:
    """Write the endpoint of one job, or of the end of one batch."""
    endpoint_id = new_id("we")
    endpoint = {
        "id": endpoint_id,
        "account_id": account_id,
        "job_id": job_id,
        "batch_id": batch_id,
        "url": webhook.url,
        "event_types": list(webhook.event_types),
    }
    conn.execute(insert(webhook_endpoint).values(**endpoint))
    secret = {"id": new_id("whs"), "endpoint_id": endpoint_id, "ciphertext": webhook.sealed_secret}
    conn.execute(insert(webhook_secret).values(**secret))


def _columns(submission: Submission) -> dict[str, Any]:
    request = submission.request
    return {
        "account_id": submission.account_id,
        "profile": submission.profile,
        "requested_profile": submission.requested_profile,
        "priority": submission.priority,
        "prompt": request.prompt,
        "params": request.to_json(),
        "contract_version": CONTRACT_VERSION,
        "wave_key": wave_key(request),
        "seed": request.seed,
        "steps": request.num_inference_steps,
        "max_attempts": submission.max_attempts,
        "expires_in_s": submission.expires_in_s,
        "exec_timeout_s": submission.exec_timeout_s,
        "retention_s": submission.retention_s,
        "notices": list(submission.notices),
        "metadata": submission.metadata,
        "user_tag": submission.user_tag,
        "traceparent": submission.traceparent,
        "batch_id": submission.batch_id,
        "reuse": submission.reuse,
        "reuse_key": submission.reuse_key(),
        "gpus": submission.gpus,
        "gpu_s_reserved": submission.gpu_s,
    }
