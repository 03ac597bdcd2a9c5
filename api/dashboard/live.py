"""Keeps the regions of a page fresh: one event stream per open page, which sends what reads differently.

The page is read again every second or two, as often as its numbers are worth; only regions whose HTML changed
are sent. The session is looked up again once in a while, so a login that is closed loses its streams too. A
stream ends after half an hour, when the process stops, and when the page cannot be read any more; the
browser comes back by itself.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.dashboard.access import ROOT, Desk, LoginNeededError, RoleError, Visitor, desk_of, visitor_of
from api.dashboard.pages import LIVE, Ask, Page
from farm.admin_sessions import refresh
from farm.clock import monotonic_s
from farm.errors import FarmError

log = structlog.get_logger(__name__)

LIFE_S = 1800.0
CHECK_SESSION_EVERY_S = 30.0
STEP_S = 0.25
RETRY_MS = 2000
PING_S = 15
STUCK_S = 10.0
MAX_STREAMS = 20


def live_route(page: Page) -> Route:
    """Return the route of a page's event stream."""

    async def follow(request: Request) -> Response:
        visitor = await visitor_of(request, page.role)
        desk = desk_of(request)
        if desk.streams[visitor.actor] >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages of yours are live already; close one"
            raise FarmError("rate_limited", 429, text, retry_after_s=5)
        # Read once before the answer begins, so that a page which is not there is a 404 and no stream.
        await page.load(Ask(request, desk.services, visitor))
        return EventSourceResponse(
            _regions(page, request, visitor, desk),
            ping=PING_S,
            send_timeout=STUCK_S,
            headers={"X-Accel-Buffering": "no"},
        )

    return Route(f"{LIVE}{page.path}", follow, methods=["GET"])


async def _regions(
    page: Page, request: Request, visitor: Visitor, desk: Desk
) -> AsyncIterator[ServerSentEvent]:
    desk.streams[visitor.actor] += 1
    try:
        async for event in _changes(page, request, visitor, desk):
            yield event
    finally:
        desk.streams[visitor.actor] -= 1
        if not desk.streams[visitor.actor]:
            del desk.streams[visitor.actor]


async def _again(page: Page, visitor: Visitor, desk: Desk) -> Visitor:
    """Look the session of a stream up again; its cookie may be an older one by now.

    Raises:
        LoginNeededError, RoleError: As their names say.
    """
    session = await desk.services.look(refresh, visitor.session) if visitor.session else None
    if session is None:
        raise LoginNeededError
    if not session.role.includes(page.role):
        raise RoleError(page.role)
    return replace(visitor, role=session.role, session=session)


async def _changes(
    page: Page, request: Request, visitor: Visitor, desk: Desk
) -> AsyncIterator[ServerSentEvent]:
    started_s = checked_s = monotonic_s()
    here = request.url.path.replace(f"{ROOT}{LIVE}", ROOT, 1)
    here += f"?{request.url.query}" if request.url.query else ""
    shown: dict[str, str] = {}
    while monotonic_s() - started_s < LIFE_S and not desk.services.is_stopping():
        try:
            if monotonic_s() - checked_s >= CHECK_SESSION_EVERY_S:
                visitor, checked_s = await _again(page, visitor, desk), monotonic_s()
            drawn = page.drawn(await page.load(Ask(request, desk.services, visitor)), visitor, here)
        except FarmError:  # logged out, or what the page shows is gone
            yield ServerSentEvent("{}", event="over", retry=RETRY_MS)
            return
        except (SQLAlchemyError, OSError) as exc:
            log.warning("page_not_fresh", page=page.name, err=type(exc).__name__)
            drawn = shown
        changed = {name: html for name, html in drawn.items() if shown.get(name) != html}
        shown = drawn
        if changed:
            yield ServerSentEvent(json.dumps(changed), event="regions", retry=RETRY_MS)
        waited_s = 0.0
        while waited_s < page.every_s and not desk.services.is_stopping():
            await asyncio.sleep(STEP_S)
            waited_s += STEP_S
    yield ServerSentEvent("{}", event="reconnect", retry=RETRY_MS)
