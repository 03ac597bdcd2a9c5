"""Looks the hosts of webhooks up without letting a name server hold anybody up.

The system's resolver blocks and cannot be interrupted, so each look-up has a daemon thread of its own and a
time limit; a thread that hangs keeps its place until it ends, and one account has a few places only. So a
tenant whose name server never answers runs out of its own places and of nobody else's. Nothing is remembered:
every attempt is looked up and checked anew.
"""

import asyncio
import contextlib
import threading
from collections import defaultdict

from farm.webhooks.guard import Policy, Resolver, Target, UrlRefusedError, resolve_pinned, system_resolver

TIMEOUT_S = 5.0
PLACES = 256
PLACES_PER_ACCOUNT = 16


class HostLookups:
    """The look-ups of one sender; belongs to one event loop."""

    def __init__(
        self, policy: Policy, resolver: Resolver = system_resolver, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Keep what is allowed and who is asked."""
        self._policy = policy
        self._resolver = resolver
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(PLACES)
        self._of_account: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PLACES_PER_ACCOUNT)
        )

    async def resolve(self, account_id: str, url: str) -> Target:
        """Return the checked address of a URL.

        Raises:
            UrlRefusedError: The guard refuses it, or the answer takes too long (`dns_timeout`).
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                of_account = self._of_account[account_id]
                await of_account.acquire()
                try:
                    await self._places.acquire()
                except BaseException:
                    of_account.release()
                    raise
                return await self._start(url, of_account)
        except TimeoutError:
            raise UrlRefusedError("dns_timeout", "the host of the URL was not resolved in time") from None

    def _start(self, url: str, of_account: asyncio.Semaphore) -> asyncio.Future[Target]:
        """Look up in a thread; both places are given back when it ends, however long that takes."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Target] = loop.create_future()

        def finish(found: Target | UrlRefusedError | None) -> None:
            self._places.release()
            of_account.release()
            if answer.done():  # nobody waits any more
                return
            if isinstance(found, Target):
                answer.set_result(found)
            else:
                answer.set_exception(found or RuntimeError("the resolver failed in an unknown way"))

        def look_up() -> None:
            found: Target | UrlRefusedError | None = None
            try:
                found = resolve_pinned(url, self._policy, self._resolver)
            except UrlRefusedError as refused:
                found = refused
            finally:
                with contextlib.suppress(RuntimeError):  # the loop may be over
                    loop.call_soon_threadsafe(finish, found)

        threading.Thread(target=look_up, name="host-lookup", daemon=True).start()
        return answer
