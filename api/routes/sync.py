"""`POST /v1/videos/sync`: an ordinary job, and the clip itself as the answer.

The job is the same as any other and goes on when the wait ends, unless the client left and did not ask to
keep it. A repeated key attaches to the job that the first request made.
"""

import asyncio
import json
from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from api.auth import requires
from api.deps import Services, ServicesDep
from api.openapi import SUBMIT_BODY
from api.problems import problem_response
from api.ranges import stream
from api.routes.content import finished_asset, open_content
from api.routes.videos import PROBLEM
from api.submission import JOB_ID, accept
from farm.accounts import Principal
from farm.clock import monotonic_s
from farm.errors import AlreadyFinishedError, FarmError, NotFoundError
from farm.jobs.control import request_cancel
from farm.jobs.job import Job
from farm.jobs.queries import get_job
from farm.jobs.states import State
from farm.jobs.video_object import MODEL_ID, video_object

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/videos", tags=["videos"])

MAX_WAITERS = 32
MAX_TIMEOUT_S = 86_400
WATCH_INTERVAL_S = 0.5
BUSY_RETRY_AFTER_S = 10
# What a job's failure means to somebody who waits for its clip; all others are the server's fault.
_STATUS = {"invalid_input": 422, "canceled": 409, "expired": 503, "profile_unavailable": 503}
_STATUS |= {"deadline_exceeded": 504}

OnDisconnect = Literal["cancel", "keep"]


@router.post(
    "/sync",
    response_class=Response,
    responses={200: {"content": {"video/mp4": {}}}, "4XX": PROBLEM, "5XX": PROBLEM},
    openapi_extra=SUBMIT_BODY,
)
async def create_video_and_wait(
    request: Request,
    services: ServicesDep,
    principal: Annotated[Principal, Depends(requires("videos:write"))],
    timeout: Annotated[int | None, Query(ge=1, le=MAX_TIMEOUT_S, description="Seconds to wait.")] = None,  # noqa: ASYNC109 - the name in the API
    on_disconnect: OnDisconnect = "cancel",
) -> Response:
    """Accept a request for one video and answer with its clip."""
    waiters = services.sync_waiters
    if waiters.total() >= MAX_WAITERS:
        message = (
            f"{MAX_WAITERS} requests wait for their clips here already; submit with POST /v1/videos and poll"
        )
        raise FarmError("no_capacity", 503, message, retry_after_s=BUSY_RETRY_AFTER_S)
    waiters[""] += 1  # a place, while the job is not known yet
    try:
        job_id = (await accept(request, services, principal)).job_id
        waiters[job_id] += 1
        waiters[""] -= 1
    except BaseException:
        waiters[""] -= 1
        raise
    try:
        wait_s = services.settings.sync.timeout_s if timeout is None else timeout
        job = await _wait(request, services, principal, job_id, wait_s)
        if await request.is_disconnected():
            await _client_left(services, principal, job_id, on_disconnect)
        return await _answer(request, services, principal, job)
    except asyncio.CancelledError:
        await asyncio.shield(_client_left(services, principal, job_id, on_disconnect))
        raise
    finally:
        waiters[job_id] -= 1
        if not waiters[job_id]:
            del waiters[job_id]


async def _wait(
    request: Request, services: Services, principal: Principal, job_id: str, wait_s: float
) -> Job:
    until_s = monotonic_s() + wait_s
    while True:
        job = await services.look(get_job, principal.account_id, job_id)
        left_s = until_s - monotonic_s()
        if job.is_finished or left_s <= 0 or services.is_stopping() or await request.is_disconnected():
            return job
        await asyncio.sleep(min(left_s, WATCH_INTERVAL_S))


async def _client_left(
    services: Services, principal: Principal, job_id: str, on_disconnect: OnDisconnect
) -> None:
    """Cancel the job of a client that is gone, unless it wants the job kept or another one waits for it."""
    if on_disconnect == "keep" or services.sync_waiters[job_id] > 1:
        return
    try:
        await services.read(request_cancel, principal.account_id, job_id, principal.key_id)
    except (AlreadyFinishedError, NotFoundError):
        return
    log.info("sync_client_left", job_id=job_id)


async def _answer(request: Request, services: Services, principal: Principal, job: Job) -> Response:
    headers = {JOB_ID: job.id, "X-Model": MODEL_ID, "Location": f"/v1/videos/{job.id}"}
    if job.state is not State.SUCCEEDED:
        return problem_response(_failure(services, job), request.scope["request_id"], headers)
    _, asset = await services.look(finished_asset, principal.account_id, job.id, "video")
    shown = video_object(job, asset)
    headers |= {
        "X-Inference-Time-S": str(shown["inference_time_s"] or 0),
        "X-Stage-Durations": json.dumps(shown["stage_durations"]),
        "X-Peak-Memory-MB": str(shown["peak_memory_mb"] or 0),
        "Content-Length": str(asset.bytes),
    }
    body = await open_content(services, asset, None)
    return StreamingResponse(stream(body, services.store_pool), headers=headers, media_type=asset.media_type)


def _failure(services: Services, job: Job) -> FarmError:
    where = f"GET /v1/videos/{job.id} tells what becomes of it"
    if job.is_finished:
        error = job.error or {}
        code = str(error.get("code", "internal"))
        failure = FarmError(
            code, _STATUS.get(code, 500), str(error.get("message", f"the video was {job.state}"))
        )
    elif services.is_stopping():
        message = f"the server is being stopped; the video goes on, and {where}"
        failure = FarmError("draining", 503, message, retry_after_s=2)
    else:
        failure = FarmError("sync_timeout", 504, f"the video goes on without this request; {where}")
    failure.members = {"video_id": job.id, "state": str(job.state)}
    return failure
