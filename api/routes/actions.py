"""What a user does to a video: cancel, retry, change, delete; and the calls that this model has not.

Each is one transaction on the job's locked row (`farm/jobs/control.py`), so it and a worker's write are one
after the other. POSTs may be repeated under an `Idempotency-Key`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from sqlalchemy import Connection

from api.auth import requires
from api.deps import Services, ServicesDep
from api.idempotency import Answer, answer_post
from api.intake import PRIORITY_SCOPE, estimated_gpu_s, gpus_of, resolve_profile
from api.json_body import body_of, read_model
from api.members import (
    MAX_EXPIRES_IN_S,
    MAX_PRIORITY,
    MIN_EXPIRES_IN_S,
    MIN_PRIORITY,
    PRIORITIES,
    bad_priority,
    priority_of,
    read_metadata,
)
from api.plain_words import given
from api.problems import RefusedError
from api.routes.videos import PROBLEM
from api.schemas import Video, VideoDeleted
from api.views import answer_of, checked_id, view_of
from farm.accounts import Principal
from farm.errors import FarmError, InvalidFieldError, ScopeError
from farm.jobs.control import Again, Changes, change_queued, delete_job, request_cancel, retry
from farm.jobs.job import Job
from farm.jobs.queries import get_job
from farm.profiles import Profile
from magi2.contract import MAX_SEED, GenerationRequest, Problem, draw_seed, problems_of

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/videos", tags=["videos"])

Writer = Annotated[Principal, Depends(requires("videos:write"))]
Canceler = Annotated[Principal, Depends(requires("videos:cancel"))]
MAX_PROFILE_CHARS = 64


# Read by hand, so that a refusal is one sentence and not one per type.
Priority = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(PRIORITIES)},
                {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY},
                {"type": "null"},
            ]
        }
    ),
]
NewSeed = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": MAX_SEED}],
            "description": "True draws one; a number is taken.",
        }
    ),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RetryBody(_Body):
    """What may be different this time."""

    profile: str | None = Field(None, min_length=1, max_length=MAX_PROFILE_CHARS)
    priority: Priority = None
    new_seed: NewSeed = False


class ChangeBody(_Body):
    """What may change while the video waits."""

    priority: Priority = None
    metadata: dict[str, str] | None = None
    expires_in: int | None = Field(None, ge=MIN_EXPIRES_IN_S, le=MAX_EXPIRES_IN_S)


@router.post("/{video_id}/cancel", response_model=Video, responses={"4XX": PROBLEM})
async def cancel_video(
    video_id: str, request: Request, services: ServicesDep, principal: Canceler
) -> Response:
    """Stop a video; a running one stops at its next step, so its state may change a little later."""
    checked_id(video_id)

    def act(conn: Connection) -> Answer:
        return _shown(conn, services, request_cancel(conn, principal.account_id, video_id, principal.key_id))

    return await answer_post(request, services, principal, {}, act)


@router.post(
    "/{video_id}/retry",
    response_model=Video,
    responses={"4XX": PROBLEM},
    openapi_extra=body_of(RetryBody),
)
async def retry_video(video_id: str, request: Request, services: ServicesDep, principal: Writer) -> Response:
    """Queue a failed, canceled or expired video again, under the same id and with a new budget."""
    checked_id(video_id)
    body = await read_model(request, services, RetryBody, check=lambda raw: _problems_of_retry(services, raw))
    priority = _priority(principal, body.priority)
    profile = await resolve_profile(services, body.profile) if body.profile else None
    seed = _seed(body.new_seed)

    def act(conn: Connection) -> Answer:
        found = get_job(conn, principal.account_id, video_id)
        again = again_for(conn, services, found, profile, Again(priority=priority, seed=seed))
        rules = services.settings.rules()
        return _shown(conn, services, retry(conn, principal.account_id, video_id, again, rules=rules))

    return await answer_post(request, services, principal, body.model_dump(), act)


@router.patch(
    "/{video_id}", response_model=Video, responses={"4XX": PROBLEM}, openapi_extra=body_of(ChangeBody)
)
async def change_video(video_id: str, request: Request, services: ServicesDep, principal: Writer) -> Response:
    """Change priority, metadata or queue time of a video that still waits."""
    checked_id(video_id)
    body = await read_model(request, services, ChangeBody, check=_problems_of_change)
    metadata = None if body.metadata is None else read_metadata(body.metadata)[0]
    changes = Changes(_priority(principal, body.priority), metadata, body.expires_in)

    def act(conn: Connection) -> Answer:
        return _shown(conn, services, change_queued(conn, principal.account_id, video_id, changes))

    return (await services.read(act)).response()


@router.delete("/{video_id}", responses={"4XX": PROBLEM})
async def delete_video(video_id: str, services: ServicesDep, principal: Writer) -> VideoDeleted:
    """Remove a video in any state, at once and for ever."""
    await services.read(delete_job, principal.account_id, checked_id(video_id), principal.key_id)
    log.info("job_deleted", job_id=video_id, account=principal.account_id)
    return VideoDeleted(id=video_id)


@router.post("/edits", responses={501: PROBLEM}, include_in_schema=False)
@router.post("/extensions", responses={501: PROBLEM}, include_in_schema=False)
@router.post("/characters", responses={501: PROBLEM}, include_in_schema=False)
@router.post("/{video_id}/remix", responses={501: PROBLEM}, include_in_schema=False)
@router.post("/{video_id}/edits", responses={501: PROBLEM}, include_in_schema=False)
@router.post("/{video_id}/extensions", responses={501: PROBLEM}, include_in_schema=False)
@router.post("/{video_id}/characters", responses={501: PROBLEM}, include_in_schema=False)
async def refuse_other_shapes(request: Request, _: Writer) -> Response:
    """Say clearly that a call of OpenAI's API has no counterpart here."""
    what = request.url.path.rpartition("/")[2]
    message = (
        f"{what} is not available: MAGI-2 Preview makes new clips from a prompt and at most one image; "
        "submit a new video with POST /v1/videos"
    )
    raise FarmError("not_implemented", 501, message)


def _shown(conn: Connection, services: Services, job: Job) -> Answer:
    return answer_of(view_of(conn, services.estimator, job), services.settings.base_url)


def _problems_of_retry(services: Services, raw: Mapping[str, Any]) -> list[Problem]:
    problems = _problems_of_priority(raw)
    name = raw.get("profile")
    if isinstance(name, str) and 0 < len(name) <= MAX_PROFILE_CHARS:  # the model tells of any other
        try:
            services.profiles.resolve(name, frozenset())
        except InvalidFieldError as exc:
            problems.append(Problem("profile", exc.code, exc.message))
    seed = raw.get("new_seed", False)
    if not isinstance(seed, bool) and not (isinstance(seed, int) and 0 <= seed <= MAX_SEED):
        text = f"new_seed must be true, false or an integer from 0 to {MAX_SEED} (got {given(seed)})"
        problems.append(Problem("new_seed", "invalid_field", text))
    return problems


def _problems_of_change(raw: Mapping[str, Any]) -> list[Problem]:
    metadata = raw.get("metadata")
    is_read = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    return [*_problems_of_priority(raw), *(read_metadata(metadata)[1] if is_read else ())]


def _problems_of_priority(raw: Mapping[str, Any]) -> list[Problem]:
    wanted = raw.get("priority")
    return [] if wanted is None or priority_of(wanted) is not None else [bad_priority(wanted)]


def _priority(principal: Principal, wanted: Any) -> int | None:
    priority = None if wanted is None else priority_of(wanted)
    if priority is None:
        return None
    if priority > 0 and PRIORITY_SCOPE not in principal.scopes:
        raise ScopeError(PRIORITY_SCOPE)
    return priority


def _seed(wanted: Any) -> int | None:
    if isinstance(wanted, bool):
        return draw_seed() if wanted else None
    return int(wanted)


def again_for(conn: Connection, services: Services, job: Job, other: Profile | None, wanted: Again) -> Again:
    """Complete what is different: another profile must take the request, and the estimate is a new one.

    Raises:
        RefusedError: The profile does not take the request.
    """
    request = GenerationRequest.from_json(job.params)
    profile = other or services.profiles.by_name.get(job.profile)
    if profile is None:
        return wanted
    gpu_s = estimated_gpu_s(conn, services.estimator, profile, request)
    wanted = replace(wanted, gpus=gpus_of(profile), gpu_s_reserved=gpu_s)
    if other is None:
        return wanted
    problems = problems_of(request, profile.limits())
    if problems:
        raise RefusedError(problems)
    timeout_s = min(max(job.exec_timeout_s, profile.execution_timeout_s), profile.execution_timeout_cap_s)
    return replace(wanted, profile=profile.name, exec_timeout_s=timeout_s)
