"""Limits that all api processes share through Redis: token buckets for rates, and places for what stays open.

While Redis is away every process has buckets of its own.

A bucket holds a minute's share and fills evenly, by the clock of Redis. Losing Redis makes the limits
coarser, but is never an error and never slow: after a failure it is left alone for a few seconds.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from farm.clock import monotonic_s
from farm.errors import FarmError

log = structlog.get_logger(__name__)

PREFIX = "magi2:rate:"
WINDOW_S = 60
PAUSE_S = 5.0
PLACE_S = 60.0
LOCAL_BUCKETS = 4096
# KEYS: the bucket. ARGV: capacity, tokens per second, cost (negative: give back). One round trip, atomic.
_TAKE = """
local at = redis.call('TIME')
local now = tonumber(at[1]) + tonumber(at[2]) / 1000000
local capacity, rate, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local kept = redis.call('HMGET', KEYS[1], 'n', 't')
local n, t = tonumber(kept[1]) or capacity, tonumber(kept[2]) or now
n = math.min(capacity, n + math.max(0, now - t) * rate)
local ok = n >= cost
if ok then n = math.min(capacity, n - cost) end
redis.call('HSET', KEYS[1], 'n', tostring(n), 't', tostring(now))
redis.call('EXPIRE', KEYS[1], math.ceil(capacity / rate) + 1)
return {ok and 1 or 0, tostring(n)}
"""


@dataclass(frozen=True)
class Verdict:
    """Whether it may be, and how the bucket stands afterwards."""

    name: str
    is_allowed: bool
    limit: int
    remaining: int
    full_in_s: int
    retry_after_s: int


# KEYS: the places of one holder. ARGV: limit (0: renew what is held), seconds that a place lasts, members.
# A place that nobody renews is free again.
_HOLD = """
local at = redis.call('TIME')
local now = tonumber(at[1]) + tonumber(at[2]) / 1000000
local limit, keep = tonumber(ARGV[1]), tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if limit > 0 and redis.call('ZCARD', KEYS[1]) >= limit then return 0 end
for place = 3, #ARGV do redis.call('ZADD', KEYS[1], now + keep, ARGV[place]) end
redis.call('EXPIRE', KEYS[1], math.ceil(keep) + 1)
return 1
"""


class Places:
    """Places of which a holder has a number over all processes; a process that dies loses its own in time.

    Without Redis every process counts alone, which is what its callers do anyway.
    """

    def __init__(self, broker: "Redis", name: str, *, keep_s: float = PLACE_S) -> None:
        """Use a client that fails fast and does not retry."""
        self._broker = broker
        self._hold = broker.register_script(_HOLD)
        self._prefix = f"magi2:{name}:"
        self._keep_s = keep_s

    async def take(self, holder: str, member: str, limit: int) -> bool:
        """Take a place if there is one; without Redis there is."""
        return await self._call(holder, limit, [member])

    async def renew(self, holder: str, members: Sequence[str]) -> None:
        """Keep places that were taken."""
        await self._call(holder, 0, members)

    async def leave(self, holder: str, member: str) -> None:
        """Give a place back."""
        try:
            await self._broker.zrem(self._prefix + holder, member)
        except (RedisError, OSError) as exc:
            log.warning("places_are_local", err=type(exc).__name__)

    async def _call(self, holder: str, limit: int, members: Sequence[str]) -> bool:
        try:
            held = await self._hold(keys=[self._prefix + holder], args=[limit, self._keep_s, *members])
        except (RedisError, OSError) as exc:
            log.warning("places_are_local", err=type(exc).__name__)
            return True
        return bool(held)


class RateLimitedError(FarmError):
    """Too often."""

    def __init__(self, verdict: Verdict) -> None:
        message = (
            f"more than {verdict.limit} {verdict.name} a minute; "
            f"the next one is possible in {verdict.retry_after_s} s"
        )
        super().__init__("rate_limited", 429, message, retry_after_s=verdict.retry_after_s)


class RateLimiter:
    """Takes tokens out of buckets."""

    def __init__(self, broker: "Redis", *, clock: Callable[[], float] = monotonic_s) -> None:
        """Use a client that fails fast and does not retry."""
        self._take = broker.register_script(_TAKE)
        self._clock = clock
        self._paused_until_s = 0.0
        self._local: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def take(self, name: str, who: str, per_minute: int, cost: int = 1) -> Verdict:
        """Take tokens if there are enough; a negative cost gives some back."""
        key = f"{PREFIX}{name}:{who}"
        rate = per_minute / WINDOW_S
        left = await self._take_shared(key, per_minute, rate, cost)
        if left is None:
            left = self._take_local(key, per_minute, rate, cost)
        is_allowed, tokens = left
        return Verdict(
            name=name,
            is_allowed=is_allowed,
            limit=per_minute,
            remaining=max(0, math.floor(tokens)),
            full_in_s=math.ceil((per_minute - tokens) / rate),
            retry_after_s=max(1, math.ceil((cost - tokens) / rate)),
        )

    async def _take_shared(
        self, key: str, capacity: int, rate: float, cost: int
    ) -> tuple[bool, float] | None:
        if self._clock() < self._paused_until_s:
            return None
        try:
            is_allowed, tokens = await self._take(keys=[key], args=[capacity, rate, cost])
        except (RedisError, OSError) as exc:
            log.warning("rate_limits_are_local", err=type(exc).__name__)
            self._paused_until_s = self._clock() + PAUSE_S
            return None
        return bool(is_allowed), float(tokens)

    def _take_local(self, key: str, capacity: int, rate: float, cost: int) -> tuple[bool, float]:
        now_s = self._clock()
        tokens, at_s = self._local.get(key, (float(capacity), now_s))
        tokens = min(capacity, tokens + (now_s - at_s) * rate)
        is_allowed = tokens >= cost
        if is_allowed:
            tokens = min(capacity, tokens - cost)
        self._local[key] = (tokens, now_s)
        self._local.move_to_end(key)
        if len(self._local) > LOCAL_BUCKETS:
            self._local.popitem(last=False)
        return is_allowed, tokens
