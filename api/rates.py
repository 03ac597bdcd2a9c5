"""Rate limits at the door: requests of a key, submits of an account; and the headers that tell of them.

`RateLimit-Policy` is on every answer under /v1, `RateLimit` wherever a bucket was asked (draft of the IETF's
httpapi group). What a verdict says travels in the scope, to where the answer's headers are written.
"""

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import Scope

from api.deps import Services
from farm.accounts import Principal
from farm.limits import WINDOW_S, RateLimitedError, Verdict
from farm.settings import RateSettings

REQUESTS, SUBMITS = "requests", "submits"
_IN_SCOPE = "rate_verdicts"


def policy(rate: RateSettings) -> str:
    """Return the value of `RateLimit-Policy`."""
    quotas = ((REQUESTS, rate.requests_per_minute), (SUBMITS, rate.submits_per_minute))
    return ", ".join(f'"{name}";q={quota};w={WINDOW_S}' for name, quota in quotas)


def open_ledger(scope: Scope) -> None:
    """Make the place in a request's scope where verdicts are kept; copies of the scope share it."""
    scope[_IN_SCOPE] = {}


def write_headers(scope: Scope, headers: MutableHeaders, policy_value: str) -> None:
    """Tell in an answer under /v1 what the limits are and how much is left."""
    if not scope["path"].startswith("/v1/"):
        return
    headers["RateLimit-Policy"] = policy_value
    verdicts: dict[str, Verdict] = scope[_IN_SCOPE]
    if verdicts:
        headers["RateLimit"] = ", ".join(
            f'"{verdict.name}";r={verdict.remaining};t={verdict.full_in_s}' for verdict in verdicts.values()
        )


async def count_request(request: Request, services: Services, principal: Principal) -> None:
    """Count one request of a key.

    Raises:
        RateLimitedError: It was one too many.
    """
    rate = services.settings.rate
    await _take(request, services, REQUESTS, principal.key_id, rate.requests_per_minute, 1)


async def count_submits(
    request: Request, services: Services, principal: Principal, num_videos: int = 1
) -> None:
    """Count submits of an account; a negative number gives back what a replay did not use.

    Raises:
        RateLimitedError: They were too many.
    """
    rate = services.settings.rate
    # A batch that is larger than the bucket waits for a full one, and not for ever.
    cost = min(num_videos, rate.submits_per_minute)
    await _take(request, services, SUBMITS, principal.account_id, rate.submits_per_minute, cost)


async def _take(
    request: Request, services: Services, name: str, who: str, per_minute: int, cost: int
) -> None:
    verdict = await services.limiter.take(name, who, per_minute, cost)
    request.scope[_IN_SCOPE][name] = verdict
    if not verdict.is_allowed:
        raise RateLimitedError(verdict)
