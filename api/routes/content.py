"""What a video left behind: `/content` (a link to the store, or the bytes), `/url` and `/timeline`.

The object is the one that the job's asset row names, so only the result of the epoch that won is ever given
out. The name offered for download is made from the id. Links are secrets: they are not logged and not to be
cached.
"""

from datetime import timedelta
from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection

from api.auth import requires
from api.deps import Services, ServicesDep
from api.problems import problem_response
from api.ranges import Span, UnsatisfiableRangeError, read_range, stream
from api.routes.videos import PROBLEM
from api.service_schemas import ContentUrl, TimelineAttempt, TimelineEvent, VideoTimeline
from api.views import checked_id
from farm.accounts import Principal
from farm.clock import now
from farm.errors import ContentExpiredError, FarmError, NotFinishedError, NotFoundError
from farm.jobs.job import Asset, Attempt, Job
from farm.jobs.queries import assets_by_job, get_job, timeline
from farm.jobs.states import State
from farm.jobs.video_object import rfc3339
from farm.storage import ObjectBody, ObjectMissingError, content_disposition

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/videos", tags=["videos"])

LINK_TTL_S = 3600
MIN_LINK_TTL_S, MAX_LINK_TTL_S = 60, 86_400
Variant = Literal["video", "thumbnail", "spritesheet", "audio", "metadata"]
# Variant -> kind of asset, end of the file name that is offered.
_KINDS = {
    "video": ("video", ".mp4"),
    "thumbnail": ("thumb", ".jpg"),
    "spritesheet": ("sprite", "-sprite.jpg"),
    "audio": ("audio", ".wav"),
    "metadata": ("meta", ".json"),
}
Reader = Annotated[Principal, Depends(requires("videos:read"))]


@router.get(
    "/{video_id}/content",
    response_class=Response,
    responses={200: {}, 206: {}, 302: {}, 416: {}, "4XX": PROBLEM},
)
async def get_content(
    video_id: str,
    request: Request,
    services: ServicesDep,
    principal: Reader,
    variant: Variant = "video",
    *,
    redirect: Annotated[bool, Query(description="False: stream through the api.")] = True,
) -> Response:
    """Return the finished clip or what was made of it: pictures, sound, metadata."""
    job, asset = await services.look(finished_asset, principal.account_id, checked_id(video_id), variant)
    filename = f"{job.id}{_KINDS[variant][1]}"
    if redirect:
        url = services.store.presign(asset.key, LINK_TTL_S, filename, asset.media_type)
        return Response(status_code=302, headers={"Location": url, "Cache-Control": "no-store"})
    return await through_the_api(request, services, asset, filename)


@router.get("/{video_id}/url", responses={"4XX": PROBLEM})
async def get_url(
    video_id: str,
    services: ServicesDep,
    principal: Reader,
    variant: Variant = "video",
    ttl: Annotated[int, Query(ge=MIN_LINK_TTL_S, le=MAX_LINK_TTL_S, description="Seconds.")] = LINK_TTL_S,
) -> ContentUrl:
    """Return a link that anybody may use until it ends."""
    job, asset = await services.look(finished_asset, principal.account_id, checked_id(video_id), variant)
    ends_at = now() + timedelta(seconds=ttl)
    url = services.store.presign(asset.key, ttl, f"{job.id}{_KINDS[variant][1]}", asset.media_type)
    return ContentUrl(url=url, expires_at=int(ends_at.timestamp()))


@router.get("/{video_id}/timeline", responses={"4XX": PROBLEM})
async def get_timeline(video_id: str, services: ServicesDep, principal: Reader) -> VideoTimeline:
    """Return everything that happened to a video: its events, and each attempt of a group."""
    found = await services.look(timeline, principal.account_id, checked_id(video_id))
    return VideoTimeline(
        id=video_id,
        events=[
            TimelineEvent(
                seq=event.seq, type=event.type, at=rfc3339(event.at), attempt=event.epoch, data=event.data
            )
            for event in found.events
        ],
        attempts=[_show_attempt(attempt) for attempt in found.attempts],
    )


def _show_attempt(attempt: Attempt) -> TimelineAttempt:
    """Show an attempt without what is for operators only: of its error, the code."""
    times = {
        name: rfc3339(at) if (at := getattr(attempt, name)) else None
        for name in ("queued_at", "started_at", "running_at", "uploading_at", "ended_at")
    }
    return TimelineAttempt(
        attempt=attempt.epoch,
        group=attempt.group_id,
        profile=attempt.profile,
        outcome=attempt.outcome,
        error_code=(attempt.error or {}).get("code"),
        timings=attempt.timings or {},
        peak_memory_mb=attempt.peak_memory_mb,
        **times,
    )


def finished_asset(conn: Connection, account_id: str, job_id: str, variant: str) -> tuple[Job, Asset]:
    """Return a finished job and the object of one variant.

    Raises:
        NotFoundError, NotFinishedError, ContentExpiredError: As their names say.
    """
    job = get_job(conn, account_id, job_id)
    if job.state is not State.SUCCEEDED:
        raise NotFinishedError(job_id, job.state)
    asset = assets_by_job(conn, account_id, [job_id], _KINDS[variant][0]).get(job_id)
    if asset is None:
        raise NotFoundError(f"the {variant} of {job_id}")
    if asset.deleted_at is not None or (asset.expires_at is not None and asset.expires_at <= now()):
        raise ContentExpiredError(job_id)
    return job, asset


async def through_the_api(request: Request, services: Services, asset: Asset, filename: str) -> Response:
    """Send an object, whole or the range that was asked for, under a name that is safe to offer."""
    tag = f'"{asset.sha256}"'
    headers = {
        "ETag": tag,
        "Accept-Ranges": "bytes",
        "Content-Disposition": content_disposition(filename),
        "Cache-Control": "private, no-cache",
    }
    known = {
        entry.strip().removeprefix("W/") for entry in request.headers.get("if-none-match", "").split(",")
    }
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    try:
        span = _span_of(request, asset, tag)
    except UnsatisfiableRangeError:
        error = FarmError(
            "range_not_satisfiable", 416, f"the content has {asset.bytes} bytes; ask within them"
        )
        whole = {"Content-Range": f"bytes */{asset.bytes}"}
        return problem_response(error, request.scope["request_id"], whole)
    headers["Content-Length"] = str(span.num_bytes if span else asset.bytes)
    if span:
        headers["Content-Range"] = f"bytes {span.start}-{span.end}/{asset.bytes}"
    status = 206 if span else 200
    if request.scope.get("is_head", False):
        return Response(status_code=status, headers=headers, media_type=asset.media_type)
    body = await open_content(services, asset, span)
    return StreamingResponse(
        stream(body, services.store_pool), status_code=status, headers=headers, media_type=asset.media_type
    )


def _span_of(request: Request, asset: Asset, tag: str) -> Span | None:
    """Return the range to send; a client that holds another version (If-Range) gets the whole file."""
    if request.headers.get("if-range", tag) != tag:
        return None
    return read_range(request.headers.get("range"), asset.bytes)


async def open_content(services: Services, asset: Asset, span: Span | None) -> ObjectBody:
    """Open an object, or a part of it, at the store.

    Raises:
        ContentExpiredError: It is gone.
        StorageError: The store does not answer.
    """
    start, end = (span.start, span.end) if span else (0, None)
    try:
        return await services.in_store(services.store.open_range, asset.key, start, end)
    except ObjectMissingError as exc:
        log.exception("object_missing", job_id=asset.job_id, kind=asset.kind)
        raise ContentExpiredError(str(asset.job_id)) from exc
