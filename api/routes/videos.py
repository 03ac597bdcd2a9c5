"""The `/v1/videos` family: submit, read, list. Acts on a video are in `api/routes/actions.py`.

`create_video` is the first hop of a job's path and reads in that order: body, members, image, contract,
store, row. No row is written and no object stored before everything has been checked, and every problem is
reported at once.
"""

import asyncio
from dataclasses import replace
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import Connection

from api.auth import requires
from api.body import read_body
from api.deps import Services, ServicesDep
from api.idempotency import REPLAYED, Answer, answer_once, find_answer, replayed, scope_of
from api.intake import Intake, estimated_gpu_s, store_input, take_request
from api.listing import list_query_of
from api.openapi import LIST_PARAMETERS, SUBMIT_BODY
from api.presenter import View, etag_of, present
from api.rates import count_submits
from api.schemas import ProblemBody, Video, VideoList
from api.views import answer_of, checked_id, read_headers, read_page, read_view, view_of
from farm.accounts import Principal
from farm.clock import monotonic_s
from farm.jobs.queries import get_job
from farm.jobs.submit import Submission, submit

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/videos", tags=["videos"])
PROBLEM = {"model": ProblemBody, "description": "Any failure: see `code`."}

MAX_WAIT_S = 60
# A waiting request looks at its row this often; twice a second costs nothing beside what a client's own
# polling does.
WATCH_INTERVAL_S = 0.5

Reader = Annotated[Principal, Depends(requires("videos:read"))]
Writer = Annotated[Principal, Depends(requires("videos:write"))]


@router.post("", response_model=Video, responses={"4XX": PROBLEM, "5XX": PROBLEM}, openapi_extra=SUBMIT_BODY)
async def create_video(request: Request, services: ServicesDep, principal: Writer) -> Response:
    """Accept a request for one video; answers as soon as it is queued."""
    body = await read_body(request, services.body_rules)
    try:
        scope = await scope_of(request, principal, body.members, body.uploads)
        stored = await find_answer(services, scope)
        if stored is not None:
            return replayed(services, stored)
        await count_submits(request, services, principal)
        intake = await take_request(services, principal, body)
        try:
            submission = await store_input(services, intake)
            answer = await answer_once(
                services, scope, lambda conn: _queue(conn, services, submission, intake)
            )
        finally:
            intake.discard()
    finally:
        body.close()
    if REPLAYED in answer.headers:
        await count_submits(request, services, principal, -1)
    return answer


@router.get("", response_model=VideoList, responses={"4XX": PROBLEM}, openapi_extra=LIST_PARAMETERS)
async def list_videos(request: Request, services: ServicesDep, principal: Reader) -> Response:
    """Return a page of the account's videos, newest first unless asked otherwise."""
    query = list_query_of(request.query_params)
    views, has_more = await services.look(read_page, principal.account_id, query)
    data = [present(view, services.settings.base_url) for view in views]
    page = VideoList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=has_more,
    )
    return Answer.of(page).response()


@router.get("/{video_id}", response_model=Video, responses={304: {}, "4XX": PROBLEM})
async def get_video(
    video_id: str,
    request: Request,
    services: ServicesDep,
    principal: Reader,
    wait: Annotated[int, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for a change.")] = 0,
) -> Response:
    """Return one video; always 200 while it exists, also when it failed."""
    known = _known_tags(request)
    view = await _look(services, principal.account_id, checked_id(video_id))
    is_unchanged = etag_of(view.job) in known
    if wait and not view.job.is_finished and (is_unchanged or not known):
        view = await _watch(request, services, view, wait)
        is_unchanged = etag_of(view.job) in known
    if is_unchanged:
        return Response(status_code=304, headers=read_headers(view))
    return answer_of(view, services.settings.base_url).response()


def _queue(conn: Connection, services: Services, submission: Submission, intake: Intake) -> Answer:
    profile = services.profiles.by_name[submission.profile]
    gpu_s = estimated_gpu_s(conn, services.estimator, profile, submission.request)
    job = submit(conn, replace(submission, gpu_s=gpu_s), rules=services.settings.rules())
    log.info("job_submitted", job_id=job.id, account=job.account_id, profile=job.profile)
    view = view_of(conn, services.estimator, job)
    answer = answer_of(view, services.settings.base_url, intake.webhook)
    answer.headers["Location"] = f"/v1/videos/{job.id}"
    return answer


async def _look(services: Services, account_id: str, job_id: str) -> View:
    return await services.look(read_view, services.estimator, account_id, job_id)


async def _watch(request: Request, services: Services, first: View, wait_s: int) -> View:
    """Wait for another state or, for a client that names an entity tag, for another tag."""
    until_s = monotonic_s() + wait_s
    account_id, job_id = first.job.account_id, first.job.id
    while (left_s := until_s - monotonic_s()) > 0 and not services.is_stopping():
        await asyncio.sleep(min(left_s, WATCH_INTERVAL_S))
        job = await services.look(get_job, account_id, job_id)
        has_changed = job.seq != first.job.seq if _known_tags(request) else job.state != first.job.state
        if has_changed or await request.is_disconnected():
            break
    return await _look(services, account_id, job_id)


def _known_tags(request: Request) -> set[str]:
    tags = request.headers.get("if-none-match", "").split(",")
    return {tag.strip().removeprefix("W/") for tag in tags if tag.strip()}
