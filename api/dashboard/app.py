"""Builds the dashboard as an application of its own, which the api mounts under `/admin`.

Its errors are pages (or JSON below `/admin/api` for holders of a key), its answers carry the headers of
`render.py`, and its static files are the only ones that browsers may keep.
"""

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import KeyCache
from api.dashboard import login, sections
from api.dashboard.access import HOME, NEEDS_LOGIN, ROOT, Desk, to_login
from api.dashboard.live import live_route
from api.dashboard.render import HEADERS, STATIC, page
from api.deps import Services
from api.problems import as_farm_error, problem_response
from api.readiness import ReadinessProbe
from farm.errors import AuthenticationError, FarmError

KEEP_STATIC = "public, max-age=604800, immutable"


class HeadersMiddleware:
    """Puts the headers of the dashboard on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if "/static/" in scope["path"]:
                    headers["Cache-Control"] = KEEP_STATIC
            await send(message)

        await self._app(scope, receive, send_with_headers)


def make_dashboard(services: Services, readiness: ReadinessProbe, keys: KeyCache) -> Starlette:
    """Build the application; it contacts nothing before the first request."""
    routes: list[BaseRoute] = [
        Route("/login", login.show_login, methods=["GET"]),
        Route("/login", login.log_in, methods=["POST"]),
        Route("/logout", login.log_out, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
        *sections.FILES,
        *sections.CHANGES,
        *(live_route(shown) for shown in sections.PAGES if shown.regions),
        *(shown.route() for shown in sections.PAGES),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(HeadersMiddleware)],
        exception_handlers=dict.fromkeys((FarmError, HTTPException, SQLAlchemyError), _refuse),
    )
    app.router.redirect_slashes = False
    app.state.desk = Desk(services, readiness, keys)
    return app


def add_dashboard(app: FastAPI, dashboard: Starlette) -> None:
    """Put the dashboard into the api, below `/admin/`; the path without the slash leads there."""

    @app.get(ROOT, include_in_schema=False)
    async def go_home() -> RedirectResponse:
        return RedirectResponse(HOME, status_code=307)

    app.mount(ROOT, dashboard)


async def _refuse(request: Request, exc: Exception) -> Response:
    error = as_farm_error(exc)
    if error.code == "internal":
        raise exc
    if error.code == NEEDS_LOGIN:
        # A browser sends the form of a page whose session has ended; everybody else is told plainly.
        is_form = "text/html" in request.headers.get("accept", "")
        if request.url.path.startswith(f"{ROOT}/api/") and not is_form:
            return problem_response(AuthenticationError(), request.scope["request_id"])
        return to_login(request)
    response = page(request, "error.html", None, error.http_status, error=error)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
