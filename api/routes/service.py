"""How the farm is doing, for its users: profiles with their queues, and what the account has used."""

from typing import Annotated

from fastapi import APIRouter, Depends
from sqlalchemy import Connection

from api.auth import requires
from api.deps import Services, ServicesDep
from api.schemas import ProblemBody
from api.service_schemas import GpuSeconds, ProfileState, ProfileStateList, UsageInfo
from farm.accounts import Principal, usage
from farm.errors import NotFoundError
from farm.jobs.estimates import Queue, queues
from farm.profile_control import paused_profiles

router = APIRouter(prefix="/v1", tags=["service"], responses={"4XX": {"model": ProblemBody}})


@router.get("/profiles")
async def list_profiles(
    services: ServicesDep, _: Annotated[Principal, Depends(requires("videos:read"))]
) -> ProfileStateList:
    """Return each profile with its live groups, its queue, and when a new job would start."""
    return ProfileStateList(data=await services.look(_states, services))


@router.get("/usage")
async def get_usage(
    services: ServicesDep, principal: Annotated[Principal, Depends(requires("usage:read"))]
) -> UsageInfo:
    """Return the account's counters beside its limits."""
    rules = services.settings.rules()
    found = await services.look(lambda conn: usage(conn, principal.account_id, rules))
    if found is None:
        raise NotFoundError("the account")
    return UsageInfo(
        queued=found.queued,
        max_queued=found.max_queued,
        running=found.running,
        max_running=found.max_running,
        gpu_seconds=GpuSeconds(
            used=found.gpu_s_used,
            reserved=found.gpu_s_reserved,
            limit=found.gpu_s_per_day,
            resets_in_s=found.day_ends_in_s,
        ),
        requests_per_minute=services.settings.rate.requests_per_minute,
        submits_per_minute=services.settings.rate.submits_per_minute,
    )


def _states(conn: Connection, services: Services) -> list[ProfileState]:
    found = queues(conn)
    paused = paused_profiles(conn)
    states = []
    for profile in services.profiles.by_name.values():
        queue = found.get(profile.name, Queue())
        clip_s = services.estimator.clip_s(conn, profile.name, profile.default_tier, profile.default_steps)
        start_s = None
        is_served = queue.live_groups and profile.name not in paused
        if is_served and queue.idle_groups > queue.queued:
            start_s = 0.0
        elif is_served and clip_s is not None:
            start_s = services.estimator.wait_s(conn, profile.name, queue.queued + 1, clip_s)
        states.append(
            ProfileState(
                name=profile.name,
                paused=profile.name in paused,
                live_groups=queue.live_groups,
                idle_groups=queue.idle_groups,
                queued=queue.queued,
                oldest_queued_s=queue.oldest_s,
                clip_s=clip_s,
                estimated_start_s=start_s,
            )
        )
    return states
