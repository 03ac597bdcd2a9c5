"""A stream's bounded queue: events are never dropped, progress is coalesced, the stuck are cut."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from api.streams import MAX_STREAMS_PER_KEY, QUEUE_SIZE, STUCK_S, Hub, Stream, TooManyStreamsError
from farm.jobs.job import Event

AT = datetime(2026, 3, 1, tzinfo=UTC)
pytestmark = pytest.mark.req("F-25")


class _Places:
    """Room for everybody, or for nobody."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room
        self.left: list[str] = []

    async def take(self, _holder: str, _member: str, _limit: int) -> bool:
        return self.has_room

    async def leave(self, _holder: str, member: str) -> None:
        self.left.append(member)


class _Services:
    """A process whose database never answers."""

    def __init__(self) -> None:
        self.stream_places = _Places()
        self.stops = False
        self.broker: Any = None
        self.errands: list[asyncio.Task[None]] = []

    def run_errand(self, work: Any) -> None:
        self.errands.append(asyncio.create_task(work))

    def is_stopping(self) -> bool:
        return self.stops

    async def look(self, *_: Any) -> Any:
        await asyncio.Event().wait()


def events(first: int, last: int) -> list[Event]:
    return [Event("video_1", seq, "changed", AT, 1) for seq in range(first, last + 1)]


def stream(**options: Any) -> Stream:
    return Stream("key", "acct", "video_1", **options)


def report(progress: int, attempt: int = 1, step: int = 0) -> dict[str, Any]:
    return {"id": "video_1", "attempt": attempt, "progress": progress, "step": step}


def test_events_before_the_cursor_are_not_told_again() -> None:
    listener = stream(cursor=3)
    listener.offer(events(1, 5), now_s=0)
    assert [event.seq for event in listener.take()[0]] == [4, 5]
    listener.offer(events(1, 5), now_s=0)
    assert listener.take() == ([], None)


def test_full_queue_loses_nothing() -> None:
    listener, told = stream(), []
    for _ in range(4):
        listener.offer(events(1, 200), now_s=0)
        taken, _ = listener.take()
        assert len(taken) <= QUEUE_SIZE
        told += [event.seq for event in taken]
    assert told == list(range(1, 201))
    assert not listener.is_cut


def test_stream_that_stays_full_is_cut_and_one_that_drains_is_not() -> None:
    stuck, slow = stream(), stream()
    for now_s in (0.0, STUCK_S - 1, STUCK_S):
        stuck.offer(events(1, 500), now_s)
        slow.offer(events(1, 500), now_s)
        slow.take()
    assert (stuck.is_cut, slow.is_cut) == (True, False)


def test_progress_is_the_newest_and_never_older() -> None:
    listener = stream()
    for given in (report(5), report(40, step=3), report(20)):
        listener.offer_progress(given)
    assert listener.take()[1] == report(40, step=3)
    listener.offer_progress(report(40, step=3))
    assert listener.take()[1] is None
    listener.offer_progress(report(0, attempt=2))
    assert listener.take()[1] == report(0, attempt=2)


def test_account_stream_without_room_ends_rather_than_skip_one() -> None:
    listener = Stream("key", "acct", since=AT)
    for event in events(1, QUEUE_SIZE):
        listener.offer_account_event(event)
    assert listener.take()[0] == []  # none is newer than the beginning
    for number in range(QUEUE_SIZE + 1):
        listener.offer_account_event(Event("video_1", number, "queued", AT + timedelta(seconds=1), 1))
    assert listener.is_cut


async def test_key_has_a_number_of_streams_and_others_do_not_feel_it() -> None:
    hub = Hub(_Services())  # type: ignore[arg-type] # all that a hub asks for
    mine = [stream() for _ in range(MAX_STREAMS_PER_KEY)]
    for listener in mine:
        await hub.open(listener)
    with pytest.raises(TooManyStreamsError) as refused:
        await hub.open(stream())
    assert (refused.value.http_status, refused.value.retry_after_s) == (429, 5)
    await hub.open(Stream("other", "acct", "video_1"))
    hub.close(mine[0])
    hub.close(mine[0])
    await hub.open(stream())
    for listener in list(hub._streams):
        hub.close(listener)
    assert hub._watching is None


async def test_stream_without_a_place_in_all_processes_is_refused_and_not_counted() -> None:
    services = _Services()
    services.stream_places.has_room = False
    hub = Hub(services)  # type: ignore[arg-type] # all that a hub asks for
    for _ in range(MAX_STREAMS_PER_KEY + 1):
        with pytest.raises(TooManyStreamsError):
            await hub.open(stream())
    services.stream_places.has_room = True
    listener = stream()
    await hub.open(listener)
    hub.close(listener)
    await asyncio.gather(*services.errands)
    assert services.stream_places.left == [listener.place]


class _Subscription:
    """A subscription without messages, that swallows what cancels its reader as `asyncio.wait_for` may."""

    def __init__(self) -> None:
        self.is_read = asyncio.Event()

    async def subscribe(self, _channel: str) -> None:
        pass

    async def get_message(self, **_: float) -> None:
        self.is_read.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)

    async def aclose(self) -> None:
        pass


@pytest.mark.req("F-26")
async def test_tasks_end_with_the_last_stream_though_a_cancellation_is_swallowed() -> None:
    services, listener, subscription = _Services(), stream(), _Subscription()
    services.broker = SimpleNamespace(pubsub=lambda **_: subscription)
    hub = Hub(services)  # type: ignore[arg-type] # all that a hub asks for
    await hub.open(listener)
    assert hub._watching is not None
    tasks = hub._watching.tasks
    await asyncio.wait_for(subscription.is_read.wait(), 60)
    hub.close(listener)
    _, running = await asyncio.wait(tasks, timeout=60)
    assert not running


@pytest.mark.req("F-26")
async def test_streams_are_closed_at_a_stop_though_the_database_hangs() -> None:
    services, listener = _Services(), stream()
    hub = Hub(services)  # type: ignore[arg-type] # all that a hub asks for
    await hub.open(listener)
    services.stops = True
    async with asyncio.timeout(60):
        while not listener.is_closing:
            await listener.wait(1)
    hub.close(listener)
