"""From a submit's body to a queued job, however it will be answered: at once, or when the clip is there.

Reads in the order of the job's path: body, key, limit, members, image, contract, store, row. No row is
written and no object stored before everything has been checked.
"""

from dataclasses import dataclass, replace

import structlog
from fastapi import Request, Response
from sqlalchemy import Connection

from api.body import Body, read_body
from api.deps import Services
from api.idempotency import REPLAYED, Answer, answer_once, find_answer, replayed, scope_of
from api.intake import Intake, estimated_gpu_s, store_input, take_request
from api.rates import count_submits
from api.views import answer_of, view_of
from farm import tracing
from farm.accounts import Principal
from farm.groups import live_fingerprints
from farm.jobs.job import Job
from farm.jobs.submit import Submission, find_reusable, submit

log = structlog.get_logger(__name__)

REUSED = "X-Reused-Video"
JOB_ID = "X-Job-Id"


@dataclass(frozen=True)
class Accepted:
    """The answer to a submit, and the job that it is about."""

    response: Response
    job_id: str


async def accept(request: Request, services: Services, principal: Principal) -> Accepted:
    """Queue what a request asks for, or find what an equal one was answered.

    Raises:
        FarmError: With every problem of the request; nothing was written.
    """
    body = await read_body(request, services.body_rules)
    try:
        return await _accept(request, services, principal, body)
    finally:
        body.close()


def queue(conn: Connection, services: Services, submission: Submission) -> Job:
    """Write a job in the caller's transaction, with its share of the day's GPU-seconds."""
    profile = services.profiles.by_name[submission.profile]
    gpu_s = estimated_gpu_s(conn, services.estimator, profile, submission.request)
    traced = replace(submission, gpu_s=gpu_s, traceparent=tracing.current())
    job = submit(conn, traced, rules=services.settings.rules())
    log.info("job_submitted", job_id=job.id, account=job.account_id, profile=job.profile)
    return job


def reused(conn: Connection, submission: Submission) -> Job | None:
    """Return a finished job that answers a submission which allows that."""
    if submission.reuse != "exact":
        return None
    engine = live_fingerprints(conn).get(submission.profile)
    return find_reusable(conn, submission.account_id, submission.reuse_key(), engine)


async def _accept(request: Request, services: Services, principal: Principal, body: Body) -> Accepted:
    scope = await scope_of(request, principal, body.members, body.uploads)
    stored = await find_answer(services, scope)
    if stored is not None:
        return Accepted(replayed(services, stored), stored.job_id or "")
    await count_submits(request, services, principal)
    intake = await take_request(services, principal, body)
    try:
        submission = await store_input(services, intake)
        async with services.turns.turn(principal.account_id):
            answer = await answer_once(services, scope, lambda conn: _act(conn, services, submission, intake))
    finally:
        intake.discard()
    if REPLAYED in answer.headers:
        await count_submits(request, services, principal, -1)
    return Accepted(answer, answer.headers[JOB_ID])


def _act(conn: Connection, services: Services, submission: Submission, intake: Intake) -> Answer:
    found = reused(conn, submission)
    job = found or queue(conn, services, submission)
    webhook = None if found else intake.webhook
    answer = answer_of(view_of(conn, services.estimator, job), services.settings.base_url, webhook)
    answer.headers.update({"Location": f"/v1/videos/{job.id}", JOB_ID: job.id})
    if found:
        answer.headers[REUSED] = "true"
    return answer
