"""What the routes share: one `Services` object per process, and the small functions that reach into it.

Everything here is cheap to build and contacts nothing until it is used, so a process starts while the
database or the store is away; `/readyz` tells the difference.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeVar

import redis.asyncio
from fastapi import Depends, Request
from pydantic import SecretStr
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from sqlalchemy.ext.asyncio import AsyncEngine

from api.body import BodyRules
from api.turns import Turns
from farm.clock import monotonic_s, now
from farm.db.session import async_unit_of_work, make_async_engine
from farm.groups import live_profiles
from farm.jobs.estimates import Estimator
from farm.limits import Places, RateLimiter
from farm.profiles import Profiles, load_profiles
from farm.settings import Settings
from farm.storage import ObjectStore, StorageError
from farm.webhooks.guard import Policy, Resolver, system_resolver

T = TypeVar("T")

IMAGE_THREADS = 2
RESOLVER_THREADS = 4
STORE_THREADS = 16
STORE_TIMEOUT_S = 60.0
REDIS_TIMEOUT_S = 1.0
QUICK_TIMEOUT_S = 0.25
KEEP_LIVE_S = 1.0


def _never() -> bool:
    return False


@dataclass
class Services:
    """The parts of one api process."""

    settings: Settings
    secret_key: SecretStr
    key_pepper: SecretStr
    engine: AsyncEngine
    store: ObjectStore
    profiles: Profiles
    broker: redis.asyncio.Redis
    quick_broker: redis.asyncio.Redis  # for what every request asks; fails fast
    guard: Policy
    body_rules: BodyRules
    resolver: Resolver
    limiter: RateLimiter
    stream_places: Places
    estimator: Estimator = field(default_factory=Estimator)
    turns: Turns = field(default_factory=Turns)
    sync_waiters: Counter[str] = field(default_factory=Counter)  # requests that wait for each job
    started_at: datetime = field(default_factory=now)
    image_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(IMAGE_THREADS, "image"))
    resolver_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(RESOLVER_THREADS, "resolver")
    )
    # Of its own, so that a store which hangs holds up nothing but what needs it.
    store_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(STORE_THREADS, "store"))
    errands: set[asyncio.Task[None]] = field(default_factory=set)
    keep_live_s: float = KEEP_LIVE_S
    _live: set[str] = field(default_factory=set)
    _live_until_s: float = 0.0
    # Set by the server: from its first stop signal on, waiting requests must answer at once.
    is_stopping: Callable[[], bool] = _never

    async def read(self, query: Callable[..., T], *arguments: Any) -> T:
        """Run a function of the domain on a connection of its own, in one short transaction."""
        async with async_unit_of_work(self.engine) as conn:
            return await conn.run_sync(query, *arguments)

    async def look(self, query: Callable[..., T], *arguments: Any) -> T:
        """Run reads of the domain without a transaction around them, which saves its round trips."""
        async with self.engine.connect() as conn:
            await conn.execution_options(isolation_level="AUTOCOMMIT")
            return await conn.run_sync(query, *arguments)

    async def live_profiles(self) -> set[str]:
        """Return the profiles that are served, as of a moment ago."""
        if self._live_until_s <= monotonic_s():
            self._live = await self.look(live_profiles)
            self._live_until_s = monotonic_s() + self.keep_live_s
        return self._live

    async def in_store(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call of the object store in a thread.

        Raises:
            StorageError: From the call, or because it took too long; the call itself may still end well.
        """
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self.store_pool, call, *arguments)
        try:
            return await asyncio.wait_for(running, STORE_TIMEOUT_S)
        except TimeoutError as exc:
            raise StorageError from exc

    def run_errand(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that no request waits for; the process does, before it closes its connections."""
        task = asyncio.create_task(work)
        self.errands.add(task)
        task.add_done_callback(self.errands.discard)

    async def close(self) -> None:
        """Give every connection and thread back."""
        await asyncio.gather(*self.errands, return_exceptions=True)
        for pool in (self.image_pool, self.resolver_pool, self.store_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        await self.broker.aclose()
        await self.quick_broker.aclose()
        await self.engine.dispose()


def make_services(
    settings: Settings, *, body_rules: BodyRules | None = None, resolver: Resolver | None = None
) -> Services:
    """Build the parts of a process from its settings.

    Args:
        settings: Must hold SECRET_KEY and KEY_PEPPER.
        body_rules: Limits of request bodies, if others than the product's.
        resolver: Looks hosts of webhooks up; the system's by default.
    """
    settings.require("secret_key", "key_pepper")
    quick_broker = _broker(settings, QUICK_TIMEOUT_S)
    return Services(
        settings=settings,
        secret_key=settings.secret_key or SecretStr(""),
        key_pepper=settings.key_pepper or SecretStr(""),
        engine=make_async_engine(settings, application="api"),
        store=ObjectStore(settings),
        profiles=load_profiles(settings.profiles_file),
        broker=_broker(settings, REDIS_TIMEOUT_S),
        quick_broker=quick_broker,
        limiter=RateLimiter(quick_broker),
        stream_places=Places(quick_broker, "streams"),
        guard=Policy.from_settings(
            allow_http=settings.webhook.allow_http, allow_cidrs=settings.webhook.allow_cidrs
        ),
        body_rules=body_rules or BodyRules(),
        resolver=resolver or system_resolver,
    )


def _broker(settings: Settings, timeout_s: float) -> redis.asyncio.Redis:
    """Return a client that does not retry: its callers know what to do without Redis."""
    return redis.asyncio.Redis.from_url(
        settings.redis_url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


def get_services(request: Request) -> Services:
    """Return the parts of this process."""
    services: Services = request.app.state.services
    return services


async def _services(request: Request) -> Services:
    """Do the same for routes; what is not a coroutine would be run in a thread, at every request."""
    return get_services(request)


ServicesDep = Annotated[Services, Depends(_services)]
