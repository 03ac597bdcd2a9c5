"""The `/v1/videos` family: submit, read, list. Acts on a video are in `api/routes/actions.py`.

`create_video` is the first hop of a job's path; what it does, in which order, is in `api/submission.py`.
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from api.auth import requires
from api.deps import Services, ServicesDep
from api.idempotency import Answer
from api.listing import list_query_of
from api.openapi import LIST_PARAMETERS, SUBMIT_BODY
from api.presenter import View, etag_of, present
from api.schemas import ProblemBody, Video, VideoList
from api.submission import accept
from api.views import answer_of, checked_id, page_of, read_headers, read_page, read_view
from farm.accounts import Principal
from farm.clock import monotonic_s
from farm.jobs.queries import get_job

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
    return (await accept(request, services, principal)).response


@router.get("", response_model=VideoList, responses={"4XX": PROBLEM}, openapi_extra=LIST_PARAMETERS)
async def list_videos(request: Request, services: ServicesDep, principal: Reader) -> Response:
    """Return a page of the account's videos, newest first unless asked otherwise."""
    query = list_query_of(request.query_params)
    views, has_more = await services.look(read_page, principal.account_id, query)
    data = [present(view, services.settings.base_url) for view in views]
    return Answer.of(page_of(data, has_more=has_more)).response()


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
