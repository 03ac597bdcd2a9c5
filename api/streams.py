"""Fans events of jobs out to many streams: one look at the database and one subscription for all of them.

Every quarter of a second one query asks how the watched jobs stand, and new events are read for those that
moved; progress comes over one Redis subscription, and from the same query while Redis is away. A stream has a
bounded queue. Progress is coalesced to the newest report. Events are never dropped: where the queue is full,
the stream's cursor stays where it is and the rest follows later; a stream that stays full for ten seconds is
cut. Nobody waits for anybody. The tasks run only while somebody listens.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from api.deps import Services
from farm.accounts import open_keys
from farm.clock import monotonic_s
from farm.errors import FarmError
from farm.ids import new_id
from farm.jobs.feed import Standing, account_events, job_events, standings
from farm.jobs.job import Event
from farm.metrics.families import SSE_CLIENTS, SSE_DROPPED
from farm.progress import CHANNEL, decode

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 0.25
QUEUE_SIZE = 64
STUCK_S = 10.0
MAX_STREAMS_PER_KEY = 20
BUSY_RETRY_AFTER_S = 5
BROKEN_S = 1.0
STOP_LOOK_S = 0.1
# Less than the five seconds within which a revocation holds.
KEEP_EVERY_S = 4.0
REMEMBERED_EVENTS = 20_000


class TooManyStreamsError(FarmError):
    """The key has as many open streams as it may have."""

    def __init__(self) -> None:
        message = f"this key has {MAX_STREAMS_PER_KEY} open event streams; close one"
        super().__init__("rate_limited", 429, message, retry_after_s=BUSY_RETRY_AFTER_S)


@dataclass(eq=False)
class Stream:
    """One listener: to one job from an event number on, or to a whole account from an instant on."""

    key_id: str
    account_id: str
    job_id: str | None = None
    cursor: int = 0
    since: datetime | None = None
    is_closing: bool = False  # the server is being stopped
    is_cut: bool = False  # too slow, or what it listens to is gone
    _events: deque[Event] = field(default_factory=deque)
    _progress: dict[str, Any] | None = None
    place: str = field(default_factory=lambda: new_id("sse"))
    _told: tuple[int, int, int] = (0, -1, -1)
    _full_since_s: float | None = None
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is something to send, or for so long."""
        try:
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        except TimeoutError:
            return

    def take(self) -> tuple[list[Event], dict[str, Any] | None]:
        """Take everything that waits."""
        events, progress = list(self._events), self._progress
        self._events.clear()
        self._progress, self._full_since_s = None, None
        if not (self.is_closing or self.is_cut):
            self._woken.clear()
        return events, progress

    def offer(self, events: Iterable[Event], now_s: float) -> None:
        """Queue events of its job as far as there is room; the cursor tells how far that was."""
        for event in events:
            if event.seq <= self.cursor:
                continue
            if len(self._events) >= QUEUE_SIZE:
                self._note_full(now_s)
                return
            self._events.append(event)
            self.cursor = event.seq
            self._woken.set()

    def offer_account_event(self, event: Event) -> None:
        """Queue an event of its account; one that finds no room would be lost, so the stream ends first."""
        if self.since is not None and event.at <= self.since:
            return
        if len(self._events) >= QUEUE_SIZE:
            self._drop()
            return
        self._events.append(event)
        self._woken.set()

    def offer_progress(self, report: dict[str, Any]) -> None:
        """Keep the newest report; an older one never takes the place of a newer."""
        position = (report["attempt"], report["progress"], report["step"])
        if position <= self._told:
            return
        self._told, self._progress = position, report
        self._woken.set()

    def close(self) -> None:
        """Ask for a farewell."""
        self.is_closing = True
        self._woken.set()

    def cut(self) -> None:
        """End it without more words."""
        self.is_cut = True
        self._woken.set()

    def _note_full(self, now_s: float) -> None:
        if self._full_since_s is None:
            self._full_since_s = now_s
        elif now_s - self._full_since_s >= STUCK_S:
            self._drop()

    def _drop(self) -> None:
        """Cut a reader that does not keep up."""
        if not self.is_cut:
            SSE_DROPPED.inc()
        self.cut()


class _Watch:
    """The tasks that serve the streams from the first that opens to the last that closes.

    They look at `is_over` in every turn: `asyncio.wait_for` of Python 3.11, which the client of Redis calls,
    may swallow a cancellation, and a task that relied on it would run for ever and hold up the end of the
    process.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.tasks: list[asyncio.Task[None]] = []

    def end(self) -> None:
        """End the tasks now, or at their next turn."""
        self.is_over = True
        for task in self.tasks:
            task.cancel()


class Hub:
    """All streams of this process."""

    def __init__(self, services: Services, clock: Callable[[], float] = monotonic_s) -> None:
        """Know the parts; nothing runs before the first stream."""
        self._services = services
        self._clock = clock
        self._streams: set[Stream] = set()
        self._per_key: Counter[str] = Counter()
        self._watching: _Watch | None = None
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()

    async def open(self, stream: Stream) -> None:
        """Add a stream.

        Raises:
            TooManyStreamsError: Its key has too many, here or in all processes together.
        """
        if self._per_key[stream.key_id] >= MAX_STREAMS_PER_KEY:
            raise TooManyStreamsError
        # Counted before anything is awaited, so that several at once cannot all find room.
        self._per_key[stream.key_id] += 1
        places = self._services.stream_places
        try:
            has_place = await places.take(stream.key_id, stream.place, MAX_STREAMS_PER_KEY)
        except BaseException:
            self._uncount(stream)
            raise
        if not has_place:
            self._uncount(stream)
            raise TooManyStreamsError
        self._streams.add(stream)
        SSE_CLIENTS.inc()
        if self._watching is None:
            self._watching = watch = _Watch()
            watch.tasks = [
                asyncio.create_task(work(watch))
                for work in (self._look_often, self._listen, self._keep_places, self._say_farewell)
            ]

    def close(self, stream: Stream) -> None:
        """Remove a stream; with the last one the tasks end."""
        if stream not in self._streams:
            return
        self._streams.remove(stream)
        SSE_CLIENTS.dec()
        self._uncount(stream)
        self._services.run_errand(self._services.stream_places.leave(stream.key_id, stream.place))
        if not self._streams:
            self._stop()

    def _uncount(self, stream: Stream) -> None:
        self._per_key[stream.key_id] -= 1
        if not self._per_key[stream.key_id]:
            del self._per_key[stream.key_id]

    def _stop(self) -> None:
        if self._watching is not None:
            self._watching.end()
            self._watching = None
        self._seen.clear()

    async def _look_often(self, watch: _Watch) -> None:
        while not watch.is_over:
            try:
                await self.look()
            except (SQLAlchemyError, OSError) as exc:
                log.warning("streams_without_database", err=type(exc).__name__)
                await asyncio.sleep(BROKEN_S)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _say_farewell(self, watch: _Watch) -> None:
        """Close all streams once the server is to stop; apart from the looks, which may hang."""
        while not watch.is_over:
            if self._services.is_stopping():
                for stream in self._streams:
                    stream.close()
            await asyncio.sleep(STOP_LOOK_S)

    async def _keep_places(self, watch: _Watch) -> None:
        """Renew the places of the streams, and cut those whose keys open nothing any more."""
        while not watch.is_over:
            await asyncio.sleep(KEEP_EVERY_S)
            by_key: dict[str, list[str]] = {}
            for stream in self._streams:
                by_key.setdefault(stream.key_id, []).append(stream.place)
            for key_id, places in by_key.items():
                await self._services.stream_places.renew(key_id, places)
            await self.cut_closed_keys()

    async def cut_closed_keys(self) -> None:
        """Cut the streams of keys that were revoked or have expired."""
        if self._services.settings.auth == "none":
            return
        ids = sorted({stream.key_id for stream in self._streams})
        try:
            still_open = await self._services.look(open_keys, ids)
        except (SQLAlchemyError, OSError) as exc:
            log.warning("streams_without_database", err=type(exc).__name__)
            return
        for stream in self._streams:
            if stream.key_id in ids and stream.key_id not in still_open:
                stream.cut()

    async def look(self) -> None:
        """Ask once how everything stands that somebody listens to, and hand on what is new."""
        of_jobs = [stream for stream in self._streams if stream.job_id is not None]
        cursors: dict[str, int] = {}
        for stream in of_jobs:
            job_id = str(stream.job_id)
            cursors[job_id] = min(stream.cursor, cursors.get(job_id, stream.cursor))
        if cursors:
            found, events = await self._services.look(_read_jobs, cursors)
            for stream in of_jobs:
                self._tell(stream, found.get(str(stream.job_id)), events.get(str(stream.job_id), ()))
        accounts = {stream.account_id for stream in self._streams if stream.job_id is None}
        if accounts:
            for account_id, event in await self._services.look(account_events, sorted(accounts)):
                self._tell_account(account_id, event)

    def _tell(self, stream: Stream, standing: Standing | None, events: Iterable[Event]) -> None:
        if standing is None:
            stream.cut()
            return
        stream.offer(events, self._clock())
        if standing.is_active:
            stream.offer_progress(standing.report())

    def _tell_account(self, account_id: str, event: Event) -> None:
        """Hand on an event that was not seen yet; events commit out of order, so each is read for a while."""
        if (event.job_id, event.seq) in self._seen:
            return
        self._seen[event.job_id, event.seq] = None
        if len(self._seen) > REMEMBERED_EVENTS:
            self._seen.popitem(last=False)
        for stream in self._streams:
            if stream.job_id is None and stream.account_id == account_id:
                stream.offer_account_event(event)

    async def _listen(self, watch: _Watch) -> None:
        """Hand reports of progress on, from one subscription; without Redis the database must do."""
        while not watch.is_over:
            pubsub = self._services.broker.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(CHANNEL)
                while not watch.is_over:
                    message = await pubsub.get_message(timeout=BROKEN_S)
                    if message is not None:
                        self._report(decode(message["data"]))
            except (RedisError, OSError) as exc:
                log.warning("streams_without_redis", err=type(exc).__name__)
                await asyncio.sleep(BROKEN_S)
            finally:
                await pubsub.aclose()  # type: ignore[no-untyped-call] # the library leaves it open

    def _report(self, message: dict[str, Any]) -> None:
        report = {
            "id": message["id"],
            "attempt": message["epoch"],
            "phase": message["phase"],
            "step": message["step"],
            "total_steps": message["total"],
            "progress": message["progress"],
        }
        for stream in self._streams:
            if stream.job_id == report["id"]:
                stream.offer_progress(report)


def _read_jobs(
    conn: Connection, cursors: dict[str, int]
) -> tuple[dict[str, Standing], dict[str, list[Event]]]:
    found = standings(conn, list(cursors))
    behind = {
        job_id: cursor for job_id, cursor in cursors.items() if job_id in found and found[job_id].seq > cursor
    }
    return found, job_events(conn, behind)
