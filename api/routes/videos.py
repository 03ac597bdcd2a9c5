"""The `/v1/videos` family: submit, read, list, cancel, delete. Content is in `api/routes/content.py`.

`create_video` is the first hop of a job's path and reads in that order: body, members, image, contract,
store, row. No row is written and no object stored before everything has been checked, and every problem is
reported at once.
"""

import asyncio
import math
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel
from sqlalchemy import Connection

from api.auth import requires
from api.body import read_body
from api.deps import Services, ServicesDep
from api.idempotency import refuse_idempotency_key
from api.intake import store_input, take_request
from api.listing import list_query_of
from api.openapi import LIST_PARAMETERS, SUBMIT_BODY
from api.presenter import View, etag_of, poll_after_ms, present
from api.schemas import CreatedWebhook, ProblemBody, Video, VideoDeleted, VideoList
from farm.accounts import Principal
from farm.clock import monotonic_s
from farm.db.session import async_unit_of_work
from farm.errors import NotFoundError
from farm.ids import is_id
from farm.jobs.control import delete_job, request_cancel
from farm.jobs.estimates import eta_s, queue_position, queue_positions
from farm.jobs.job import Job
from farm.jobs.queries import ListQuery, assets_by_job, get_job, list_jobs
from farm.jobs.states import State
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
Canceler = Annotated[Principal, Depends(requires("videos:cancel"))]


@router.post("", response_model=Video, responses={"4XX": PROBLEM, "5XX": PROBLEM}, openapi_extra=SUBMIT_BODY)
async def create_video(request: Request, services: ServicesDep, principal: Writer) -> Response:
    """Accept a request for one video; answers as soon as it is queued."""
    refuse_idempotency_key(request)
    body = await read_body(request, services.body_rules)
    try:
        intake = await take_request(services, principal, body)
        try:
            view = await _queue(services, await store_input(services, intake))
        finally:
            intake.discard()
    finally:
        body.close()
    log.info("job_submitted", job_id=view.job.id, account=principal.account_id, profile=view.job.profile)
    answer = _answer(services, view, intake.webhook)
    answer.headers["Location"] = f"/v1/videos/{view.job.id}"
    return answer


@router.get("", response_model=VideoList, responses={"4XX": PROBLEM}, openapi_extra=LIST_PARAMETERS)
async def list_videos(request: Request, services: ServicesDep, principal: Reader) -> Response:
    """Return a page of the account's videos, newest first unless asked otherwise."""
    query = list_query_of(request.query_params)
    views, has_more = await services.read(_page, principal.account_id, query)
    data = [present(view, services.settings.base_url) for view in views]
    page = VideoList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=has_more,
    )
    return _json(page)


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
    view = await services.read(_view, principal.account_id, checked_id(video_id))
    is_unchanged = etag_of(view.job) in known
    if wait and not view.job.is_finished and (is_unchanged or not known):
        view = await _watch(request, services, view, wait)
        is_unchanged = etag_of(view.job) in known
    if is_unchanged:
        return Response(status_code=304, headers=_read_headers(view))
    return _answer(services, view)


@router.post("/{video_id}/cancel", response_model=Video, responses={"4XX": PROBLEM})
async def cancel_video(video_id: str, services: ServicesDep, principal: Canceler) -> Response:
    """Stop a video; a running one stops at its next step, so its state may change a little later."""
    video_id = checked_id(video_id)
    await services.read(request_cancel, principal.account_id, video_id, principal.key_id)
    return _answer(services, await services.read(_view, principal.account_id, video_id))


@router.delete("/{video_id}", responses={"4XX": PROBLEM})
async def delete_video(video_id: str, services: ServicesDep, principal: Writer) -> VideoDeleted:
    """Remove a video in any state, at once and for ever."""
    await services.read(delete_job, principal.account_id, checked_id(video_id), principal.key_id)
    return VideoDeleted(id=video_id)


def checked_id(video_id: str) -> str:
    """Return an id that has the form of one.

    Raises:
        NotFoundError: It cannot name a video, so the database is not asked.
    """
    if not is_id(video_id, "video"):
        raise NotFoundError("this video")
    return video_id


async def _queue(services: Services, submission: Submission) -> View:
    rules = services.settings.rules()
    async with async_unit_of_work(services.engine) as conn:
        job = await conn.run_sync(lambda sync: submit(sync, submission, rules=rules))
        return await conn.run_sync(_view_of, job)


def _view(conn: Connection, account_id: str, job_id: str) -> View:
    return _view_of(conn, get_job(conn, account_id, job_id))


def _view_of(conn: Connection, job: Job) -> View:
    assets = assets_by_job(conn, job.account_id, [job.id], "video") if job.state is State.SUCCEEDED else {}
    return View(job, assets.get(job.id), queue_position(conn, job), eta_s(conn, job))


def _page(conn: Connection, account_id: str, query: ListQuery) -> tuple[list[View], bool]:
    """Read a page; `eta_s` stays null in lists, since it takes several queries for each job."""
    page = list_jobs(conn, account_id, query)
    finished = [job.id for job in page.jobs if job.state is State.SUCCEEDED]
    assets = assets_by_job(conn, account_id, finished, "video") if finished else {}
    queued = [job.id for job in page.jobs if job.state is State.QUEUED]
    positions = queue_positions(conn, queued) if queued else {}
    views = [View(job, assets.get(job.id), positions.get(job.id)) for job in page.jobs]
    return views, page.has_more


async def _watch(request: Request, services: Services, first: View, wait_s: int) -> View:
    """Wait for another state or, for a client that names an entity tag, for another tag."""
    until_s = monotonic_s() + wait_s
    account_id, job_id = first.job.account_id, first.job.id
    while (left_s := until_s - monotonic_s()) > 0 and not services.is_stopping():
        await asyncio.sleep(min(left_s, WATCH_INTERVAL_S))
        job = await services.read(get_job, account_id, job_id)
        has_changed = job.seq != first.job.seq if _known_tags(request) else job.state != first.job.state
        if has_changed or await request.is_disconnected():
            break
    return await services.read(_view, account_id, job_id)


def _known_tags(request: Request) -> set[str]:
    tags = request.headers.get("if-none-match", "").split(",")
    return {tag.strip().removeprefix("W/") for tag in tags if tag.strip()}


def _answer(services: Services, view: View, webhook: CreatedWebhook | None = None) -> Response:
    return _json(present(view, services.settings.base_url, webhook), _read_headers(view))


def _read_headers(view: View) -> dict[str, str]:
    headers = {"ETag": etag_of(view.job), "Cache-Control": "private, no-cache"}
    after_ms = poll_after_ms(view)
    if after_ms is not None:
        headers["openai-poll-after-ms"] = str(after_ms)
        headers["Retry-After"] = str(math.ceil(after_ms / 1000))
    return headers


def _json(answer: BaseModel, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json", headers=headers)
