"""Every failure of a request becomes one body here: RFC 9457 members and OpenAI's error object in one.

`ProblemMiddleware` wraps the whole application: it gives each request its id, catches whatever no route
caught, and writes one log line per request. Nothing of an exception but a `FarmError`'s own sentence reaches
the client: no stack, host, path or SQL. Which error a rule breaks is decided where the rule is, not here.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from psycopg.errors import LockNotAvailable, QueryCanceled
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.plain_words import problem_of
from api.rates import open_ledger, write_headers
from farm.clock import monotonic_s
from farm.errors import ErrorDetail, FarmError
from farm.ids import new_id
from farm.metrics.families import HTTP_REQUESTS, HTTP_SECONDS, QUOTA_REJECTIONS, SUBMIT_SECONDS
from farm.tracing import HEADER as TRACEPARENT
from farm.tracing import submitting
from magi2.contract import Problem

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
REQUEST_ID_HEADER = "X-Request-Id"
DATABASE_RETRY_AFTER_S = 2
QUOTA_CODES = frozenset({"queue_full", "quota_exceeded"})
METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"})
SUBMIT_PATHS = frozenset({"/v1/videos", "/v1/videos/sync", "/v1/videos/batches"})
SUBMITS = frozenset({("POST", "/v1/videos"), ("POST", "/v1/videos/batches")})

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "not_found_error",
    429: "rate_limit_error",
}
# What a broken rule of the request contract means over HTTP: code and status; all others are 422
# invalid_field.
_CONTRACT_CODES = {
    "seconds_unsupported": ("unsupported_duration", 422),
    "resolution_unsupported": ("unsupported_size", 422),
    "size_incomplete": ("unsupported_size", 422),
    "size_invalid": ("unsupported_size", 422),
    "size_unsupported": ("unsupported_size", 422),
    "size_resolution_mismatch": ("unsupported_size", 422),
    "num_frames_unsupported": ("unsupported_num_frames", 422),
    "fps_unsupported": ("unsupported_fps", 422),
    "deterministic_mismatch": ("deterministic_mismatch", 422),
    "profile_limit": ("profile_limit", 422),
    "image_undecodable": ("invalid_image", 400),
    "image_too_small": ("invalid_image", 400),
    "image_aspect": ("invalid_image", 400),
}


class RefusedError(FarmError):
    """A request with one or more problems; code and status are those of the first."""

    def __init__(self, problems: Sequence[Problem], *, first: tuple[str, int] | None = None) -> None:
        """Take all problems in their order; `first` overrides what the first one means over HTTP."""
        code, status = first or _CONTRACT_CODES.get(problems[0].code, ("invalid_field", 422))
        details = [
            ErrorDetail(loc=problem.field, msg=problem.message, type=problem.code) for problem in problems
        ]
        super().__init__(code, status, problems[0].message, details)


def problem_body(error: FarmError, request_id: str) -> dict[str, Any]:
    """Build the body of an error answer."""
    kind = _TYPES.get(
        error.http_status, "server_error" if error.http_status >= 500 else "invalid_request_error"
    )
    return {
        "type": f"urn:magi2:error:{error.code}",
        "title": error.code.replace("_", " ").capitalize(),
        "status": error.http_status,
        "detail": error.message,
        "instance": request_id,
        "code": error.code,
        "errors": [{"loc": detail.loc, "msg": detail.msg, "type": detail.type} for detail in error.errors],
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.errors[0].loc if error.errors else None,
            "code": error.code,
        },
        **error.members,
    }


def problem_response(
    error: FarmError, request_id: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Render an error with the headers that its status asks for."""
    extra = dict(headers or {})
    if error.http_status == 401:
        extra["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        extra["Retry-After"] = str(max(1, error.retry_after_s))
    if error.code in QUOTA_CODES:
        QUOTA_REJECTIONS.inc()
    if error.http_status in {408, 413}:
        # The rest of the body was not read, so the connection cannot carry another request.
        extra["Connection"] = "close"
    body = problem_body(error, request_id)
    return JSONResponse(body, status_code=error.http_status, headers=extra, media_type=MEDIA_TYPE)


def install(app: FastAPI, routers: Sequence[APIRouter], rate_policy: str) -> None:
    """Make the application, which has these routers, answer every failure in the one form."""
    app.state.routers = list(routers)
    for kind in (FarmError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _handle)
    app.add_middleware(ProblemMiddleware, rate_policy=rate_policy)


async def _handle(request: Request, exc: Exception) -> JSONResponse:
    is_method = isinstance(exc, HTTPException) and exc.status_code == 405
    headers = {"Allow": ", ".join(_allowed_methods(request))} if is_method else None
    return problem_response(as_farm_error(exc), request.scope["request_id"], headers)


def _allowed_methods(request: Request) -> list[str]:
    """Collect the methods of every route of a path; the framework's own header names the first route's."""
    allowed: set[str] = set()
    for router in request.app.state.routers:
        for route in router.routes:
            if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
                allowed |= route.methods or set()
    return sorted(allowed | ({"HEAD"} if "GET" in allowed else set()))


def as_farm_error(exc: Exception) -> FarmError:
    """Translate what frameworks and libraries raise; what nobody knows becomes `internal`."""
    if isinstance(exc, FarmError):
        return exc
    if isinstance(exc, HTTPException):
        return _of_http_exception(exc)
    if isinstance(exc, RequestValidationError):
        return _of_validation_error(exc)
    if isinstance(exc, ClientDisconnect):
        return FarmError("client_disconnected", 400, "the connection closed before the whole body arrived")
    if _is_database_away(exc):
        message = "the database does not answer; try again"
        if isinstance(getattr(exc, "orig", None), LockNotAvailable | QueryCanceled):
            message = "others keep the database busy; nothing was done: try again"
        return FarmError("no_database", 503, message, retry_after_s=DATABASE_RETRY_AFTER_S)
    return FarmError("internal", 500, "something went wrong on the server; the request id leads to the log")


def _is_database_away(exc: Exception) -> bool:
    if isinstance(exc, (OperationalError, InterfaceError, PoolTimeoutError)):
        return True
    return isinstance(exc, DBAPIError) and exc.connection_invalidated


def _of_http_exception(exc: HTTPException) -> FarmError:
    if exc.status_code == 404:
        return FarmError("not_found", 404, "there is nothing at this path; see /docs for the paths there are")
    if exc.status_code == 405:
        return FarmError(
            "method_not_allowed", 405, "this path does not take this method; see the Allow header"
        )
    return FarmError("invalid_request", exc.status_code, "the request cannot be served")


def _of_validation_error(exc: RequestValidationError) -> FarmError:
    # The first part of the place is where it came from, such as `query`.
    return RefusedError([problem_of(entry, place=entry["loc"][1:]) for entry in exc.errors()])


class ProblemMiddleware:
    """The outermost layer: request id, rate-limit headers, catch-all and the request's log line."""

    def __init__(self, app: ASGIApp, rate_policy: str) -> None:
        """Wrap an application."""
        self._app = app
        self._rate_policy = rate_policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        open_ledger(scope)
        scope["request_id"] = request_id = _request_id(scope)
        started_s = monotonic_s()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
                write_headers(scope, headers, self._rate_policy)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                with submitting(_traceparent(scope)) if _is_submit(scope) else nullcontext():
                    await self._app(scope, receive, send_with_id)
            except Exception as exc:  # the process boundary of a request
                error = as_farm_error(exc)
                if error.code == "internal":
                    log.exception("request_crashed")
                elif error.http_status >= 500:
                    log.warning("request_failed", code=error.code, err=type(exc).__name__)
                if status == 0:
                    await problem_response(error, request_id)(scope, receive, send_with_id)
                else:
                    raise  # half an answer is out; the server must cut the connection
            finally:
                _tell(scope, status, monotonic_s() - started_s)


def _is_submit(scope: Scope) -> bool:
    """Tell whether a request will queue videos; asked before it has found its route."""
    return scope["method"] == "POST" and scope["path"] in SUBMIT_PATHS


def _traceparent(scope: Scope) -> str | None:
    return Headers(scope=scope).get(TRACEPARENT)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else new_id("req")


def _tell(scope: Scope, status: int, duration_s: float) -> None:
    """Log and count a request by its route's pattern: ids and query strings stay out of both."""
    route = getattr(scope.get("route"), "path", None)
    duration_ms = round(duration_s * 1000, 1)
    log.info("request", method=scope["method"], route=route, status=status, duration_ms=duration_ms)
    # Closed lists: a client may send any method and any path.
    method = scope["method"] if scope["method"] in METHODS else "other"
    status_class = f"{status // 100}xx" if status else "none"
    HTTP_REQUESTS.labels(route or "none", method, status_class).inc()
    HTTP_SECONDS.labels(route or "none", method, status_class).observe(duration_s)
    if (method, route) in SUBMITS:
        outcome = {2: "accepted", 4: "refused", 5: "failed"}.get(status // 100, "failed")
        SUBMIT_SECONDS.labels("limited" if status == 429 else outcome).observe(duration_s)
