"""The courtesy check of a webhook's URL when it is registered; every delivery checks again and decides."""

import asyncio

from api.deps import Services
from farm.webhooks.guard import UrlRefusedError, check_url

# A slow name server must not hold a request up.
RESOLVE_TIMEOUT_S = 2.0


async def refusal_of(services: Services, url: str) -> str | None:
    """Return why a URL may not be registered, or None."""
    loop = asyncio.get_running_loop()
    check = loop.run_in_executor(services.resolver_pool, check_url, url, services.guard, services.resolver)
    try:
        await asyncio.wait_for(check, RESOLVE_TIMEOUT_S)
    except UrlRefusedError as refused:
        return refused.message
    except TimeoutError:
        return None
    return None
