"""Logging in and out.

What is wrong about a login is never told apart: unknown name, wrong password, closed and locked logins get
the same sentence after the same work. Tries are counted per address and name in Redis (or in this process,
while Redis is away), wrong passwords per login in the database.
"""

import asyncio

import structlog
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.dashboard.access import (
    COOKIE,
    HOME,
    ROOT,
    ForgedRequestError,
    LoginNeededError,
    changer_of,
    client_ip,
    is_own_origin,
    read_form,
    safe_path,
    services_of,
    set_session,
    visitor_of,
)
from api.dashboard.render import page
from farm import audit
from farm.admin_sessions import close_session, open_session
from farm.admins import Role, credentials_of, has_admins, is_password, note_failure, note_success

log = structlog.get_logger(__name__)

TRIES_PER_MINUTE = 5
REFUSED = "Name or password is wrong, or this login is closed or locked for a while."
TOO_OFTEN = "Too many tries. Wait a minute, then try again."


async def show_login(request: Request) -> Response:
    """Show the form, or go on where somebody is logged in already."""
    target = safe_path(request.query_params.get("next", HOME))
    try:
        await visitor_of(request, Role.VIEWER)
    except LoginNeededError:
        return await _form(request, target)
    return RedirectResponse(target, status_code=303)


async def log_in(request: Request) -> Response:
    """Check name and password and open a session.

    Raises:
        ForgedRequestError: The form was sent by another site.
    """
    form = await read_form(request)
    if not is_own_origin(request):
        raise ForgedRequestError
    services, ip = services_of(request), client_ip(request)
    name, target = form.get("name", "").strip().lower()[:64], safe_path(form.get("next", HOME))
    verdict = await services.limiter.take("logins", f"{ip}:{name}", TRIES_PER_MINUTE)
    if not verdict.is_allowed:
        return await _form(request, target, name, TOO_OFTEN, status=429)
    credentials = await services.look(credentials_of, name)
    # A tenth of a second of a core: neither in a transaction nor on the event loop.
    is_right = await asyncio.to_thread(is_password, credentials, form.get("password", ""))
    if not is_right:
        log.warning("login_refused", name=name, ip=ip)
        await services.read(lambda conn: note_failure(conn, name, ip=ip))
        return await _form(request, target, name, REFUSED, status=401)

    def enter(conn: Connection) -> str:
        note_success(conn, credentials.id, ip=ip)
        return open_session(conn, credentials.id)

    token = await services.read(enter)
    log.info("logged_in", name=name, ip=ip)
    response = RedirectResponse(target, status_code=303)
    set_session(response, request, token)
    return response


async def log_out(request: Request) -> Response:
    """End the session."""
    visitor = await changer_of(request, Role.VIEWER, await read_form(request))
    session = visitor.session

    def leave(conn: Connection) -> None:
        if session is not None:
            close_session(conn, session)
        audit.record(conn, visitor.actor, "admin.logout", visitor.name, ip=visitor.ip)

    await services_of(request).read(leave)
    response = RedirectResponse(f"{ROOT}/login", status_code=303)
    response.delete_cookie(COOKIE, path=ROOT)
    return response


async def _form(
    request: Request, target: str, name: str = "", problem: str = "", *, status: int = 200
) -> Response:
    is_new = not await services_of(request).look(has_admins)
    return page(request, "login.html", None, status, target=target, name=name, problem=problem, is_new=is_new)
