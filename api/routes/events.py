"""Server-sent events: `/v1/videos/{id}/events` for one video, `/v1/events` for all of an account.

A stream of one video begins with a `snapshot`, goes on with every `state` event (its id is the event's
number, so that `Last-Event-ID` resumes without a gap) and the newest `progress`, and ends with `done`. When
the server stops, or after half an hour, `reconnect` says to come again.
"""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import Connection, select
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from api.auth import requires
from api.deps import Services, ServicesDep
from api.presenter import View, present
from api.routes.videos import PROBLEM
from api.streams import Hub, Stream
from api.views import checked_id, read_view
from farm.accounts import Principal
from farm.clock import db_now, monotonic_s
from farm.errors import NotFoundError
from farm.jobs.feed import account_events_after
from farm.jobs.job import Event
from farm.jobs.states import TERMINAL, State, openai_status
from farm.jobs.video_object import rfc3339

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1", tags=["events"])

RETRY_MS = 2000
PING_S = 15
SEND_TIMEOUT_S = 10
FAREWELL_S = 5
_STATES = frozenset(map(str, State))
LIFE_S = 30 * 60.0
STREAM = "text/event-stream"
_STREAM_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": {STREAM: {}}}, "4XX": PROBLEM}
Reader = Annotated[Principal, Depends(requires("videos:read"))]

# The hub closes streams itself, with a farewell; a second watcher of the server's signals is not needed.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call] # the library leaves it open


class _Stream(EventSourceResponse):
    """A stream whose reader may get stuck: then it ends, and that is no crash."""

    def __init__(self, events: AsyncIterator[ServerSentEvent], hub: Hub, stream: Stream) -> None:
        super().__init__(
            events,
            ping=PING_S,
            ping_message_factory=lambda: ServerSentEvent(comment="ping"),
            send_timeout=SEND_TIMEOUT_S,
            shutdown_grace_period=FAREWELL_S,
        )
        self._hub, self._listener = hub, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            log.info("stream_stuck")
        finally:
            # Here and not in the generator, which never runs where the client left at once.
            self._hub.close(self._listener)


@router.get("/videos/{video_id}/events", response_class=Response, responses=_STREAM_ANSWER)
async def stream_video(video_id: str, request: Request, services: ServicesDep, principal: Reader) -> Response:
    """Follow one video until its end."""
    checked_id(video_id)
    account_id = principal.account_id
    view = await services.look(read_view, services.estimator, account_id, video_id)
    if request.scope.get("is_head", False):
        return Response(media_type=STREAM, headers={"Cache-Control": "no-store"})
    stream = Stream(principal.key_id, account_id, video_id, cursor=_cursor_of(request, view))
    hub: Hub = request.app.state.hub
    await hub.open(stream)
    return _Stream(_video_events(services, stream, view), hub, stream)


@router.get("/events", response_class=Response, responses=_STREAM_ANSWER)
async def stream_account(request: Request, services: ServicesDep, principal: Reader) -> Response:
    """Follow the states of all videos of the account."""
    if request.scope.get("is_head", False):
        return Response(media_type=STREAM, headers={"Cache-Control": "no-store"})
    missed: list[Event] = []
    job_id, _, seq = request.headers.get("last-event-id", "").partition(".")
    since = await services.look(_database_time)
    if seq.isdecimal() and len(seq) < 10:
        missed = await services.look(account_events_after, principal.account_id, job_id, int(seq))
    if missed:
        since = missed[-1].at
    stream = Stream(principal.key_id, principal.account_id, since=since)
    hub: Hub = request.app.state.hub
    await hub.open(stream)
    return _Stream(_account_events(stream, missed), hub, stream)


async def _video_events(services: Services, stream: Stream, view: View) -> AsyncIterator[ServerSentEvent]:
    yield ServerSentEvent(_shown(services, view), event="snapshot", retry=RETRY_MS)
    until_s = monotonic_s() + LIFE_S
    newest = stream.cursor
    while not (view.job.is_finished and newest >= view.job.seq):
        await stream.wait(until_s - monotonic_s())
        events, progress = stream.take()
        for event in events:
            newest = event.seq
            yield _state(event, str(event.seq))
        if any(event.type in TERMINAL for event in events):
            try:
                view = await services.look(read_view, services.estimator, stream.account_id, view.job.id)
            except NotFoundError:  # deleted as soon as it had ended
                stream.cut()
        if progress is not None and not view.job.is_finished:
            yield ServerSentEvent(json.dumps(progress), event="progress")
        if any(event.type == "deleted" for event in events) or (stream.is_cut and not events):
            return
        if stream.is_closing or monotonic_s() >= until_s:
            yield _reconnect()
            return
    yield ServerSentEvent(_shown(services, view), event="done")


async def _account_events(stream: Stream, missed: list[Event]) -> AsyncIterator[ServerSentEvent]:
    yield ServerSentEvent(comment="ok", retry=RETRY_MS)
    for event in missed:
        yield _state(event, f"{event.job_id}.{event.seq}")
    until_s = monotonic_s() + LIFE_S
    while not stream.is_cut:
        await stream.wait(until_s - monotonic_s())
        for event in stream.take()[0]:
            yield _state(event, f"{event.job_id}.{event.seq}")
        if stream.is_closing or monotonic_s() >= until_s:
            yield _reconnect()
            return


def _state(event: Event, event_id: str) -> ServerSentEvent:
    """Tell an event; what is not a move (a wish to cancel, a change) has a type but no state."""
    data: dict[str, Any] = {
        "id": event.job_id,
        "seq": event.seq,
        "type": event.type,
        "at": rfc3339(event.at),
        "attempt": event.epoch,
    }
    if event.type in _STATES:
        data |= {"state": event.type, "status": openai_status(State(event.type))}
    return ServerSentEvent(json.dumps(data), event="state", id=event_id)


def _reconnect() -> ServerSentEvent:
    return ServerSentEvent("{}", event="reconnect", retry=RETRY_MS)


def _shown(services: Services, view: View) -> str:
    return present(view, services.settings.base_url).model_dump_json()


def _cursor_of(request: Request, view: View) -> int:
    """Return the number of the last event that the client has; one that is not there yet means the newest."""
    given = request.headers.get("last-event-id", "")
    if given.isdecimal() and len(given) < 10:
        return min(int(given), view.job.seq)
    return view.job.seq


def _database_time(conn: Connection) -> datetime:
    at: datetime = conn.execute(select(db_now())).scalar_one()
    return at
