"""What a change is: a POST below `/admin/api`, its checks, its transaction, its audit entries, its answer.

The same routes serve the forms of the pages and holders of an admin key. A form is answered with a redirect
to where it came from and one sentence about what was done; a key gets the sentence as JSON. A refusal goes
the same ways.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from api.dashboard.access import (
    SAID_COOKIE,
    Visitor,
    changer_of,
    is_secure,
    read_form,
    safe_path,
    services_of,
)
from api.dashboard.render import say
from api.deps import Services
from api.problems import problem_response
from farm import audit
from farm.admins import Role
from farm.errors import FarmError, InvalidFieldError

SAID_FOR_S = 60


@dataclass(frozen=True)
class Change:
    """Somebody wants to change something, and may."""

    request: Request
    services: Services
    visitor: Visitor
    form: Mapping[str, str]

    def word(self, name: str) -> str:
        """Return a field of the form, empty if it is not there."""
        return self.form.get(name, "").strip()

    def number(self, name: str) -> int | None:
        """Return a whole number of the form, None where the field is empty.

        Raises:
            InvalidFieldError: It is no whole number.
        """
        text = self.word(name)
        if not text:
            return None
        try:
            return int(text)
        except ValueError:
            raise InvalidFieldError(name, f"{name} is {text!r}; use a whole number, or nothing") from None

    def part(self, name: str) -> str:
        """Return a part of the path."""
        return str(self.request.path_params[name])

    def note(
        self,
        conn: Connection,
        action: str,
        target: str,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the audit entry, in the transaction of the change."""
        audit.record(conn, self.visitor.actor, action, target, before, after, ip=self.visitor.ip)


@dataclass(frozen=True)
class Done:
    """What was done, in a sentence; where to go, if not back; what the holder of a key gets beside it."""

    said: str
    to: str | None = None
    members: Mapping[str, Any] | None = None


Act = Callable[[Change], Awaitable[Done | Response]]


def change_route(path: str, act: Act, role: Role = Role.OPERATOR) -> Route:
    """Return the route of a change."""

    async def take(request: Request) -> Response:
        form: Mapping[str, str] = {}
        try:
            form = await read_form(request)
            visitor = await changer_of(request, role, form)
        except FarmError as error:
            if "authorization" in request.headers:
                return problem_response(error, request.scope["request_id"])
            raise
        try:
            done = await act(Change(request, services_of(request), visitor, form))
        except FarmError as error:
            if visitor.session is None:
                return problem_response(error, request.scope["request_id"])
            return _back(request, form, error.message, is_error=True)
        if isinstance(done, Response):
            return done
        if visitor.session is None:
            return JSONResponse({"said": done.said, **(done.members or {})})
        return _back(request, form, done.said, to=done.to)

    return Route(f"/api{path}", take, methods=["POST"])


def _back(
    request: Request, form: Mapping[str, str], said: str, *, to: str | None = None, is_error: bool = False
) -> Response:
    response = RedirectResponse(to or safe_path(form.get("back", "")), status_code=303)
    response.set_cookie(
        SAID_COOKIE,
        say(said, is_error=is_error),
        max_age=SAID_FOR_S,
        path="/admin",
        secure=is_secure(request),
        httponly=True,
        samesite="lax",
    )
    return response
