"""Who is asking, and may they: sessions, roles, the CSRF token and the Origin of changes.

A page needs a session. A change needs a session with its CSRF token and a request that comes from our own
origin, or, below `/admin/api`, an API key with an admin scope, which no browser sends by itself and which
therefore needs no token. Nothing changes on GET.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.auth import KeyCache
from api.deps import Services
from api.readiness import ReadinessProbe
from farm.accounts import authenticate
from farm.admin_sessions import LIFE_S, Session, find_session, rotate
from farm.admins import Role
from farm.errors import AuthenticationError, FarmError, ScopeError

COOKIE, SAID_COOKIE = "magi2_admin", "magi2_admin_said"
ROOT = "/admin"
HOME = f"{ROOT}/"
MAX_FORM_BYTES = 64 * 1024
CSRF_FIELD = "csrf"
_SCOPES = {Role.VIEWER: "admin:read", Role.OPERATOR: "admin:write", Role.ADMIN: "admin:write"}
NEEDS_LOGIN = "needs_login"


class LoginNeededError(FarmError):
    """There is no open session."""

    def __init__(self) -> None:
        super().__init__(NEEDS_LOGIN, 401, "log in first")


class RoleError(FarmError):
    """The role does not suffice."""

    def __init__(self, needed: Role) -> None:
        super().__init__("insufficient_role", 403, f"this needs the role {needed}; ask an admin for it")


class ForgedRequestError(FarmError):
    """The change may not come from one of our own pages."""

    def __init__(self) -> None:
        message = "the request does not come from a page of this dashboard, or the page is too old; reload it"
        super().__init__("forged_request", 403, message)


@dataclass(frozen=True)
class Visitor:
    """Who is asking; `session` is None for an API key."""

    name: str
    role: Role
    actor: str
    ip: str | None
    session: Session | None = None
    cookie: str | None = field(default=None, repr=False)  # a fresh one to be set

    def may(self, role: str) -> bool:
        """Tell whether the visitor has at least this role; for templates."""
        return self.role.includes(Role(role))

    @property
    def csrf(self) -> str:
        """Return the token that forms carry."""
        return self.session.csrf if self.session else ""


@dataclass
class Desk:
    """What the dashboard of one process keeps: the parts of the process, and who has streams open."""

    services: Services
    readiness: ReadinessProbe
    keys: KeyCache
    streams: Counter[str] = field(default_factory=Counter)


def desk_of(request: Request) -> Desk:
    """Return what this process keeps."""
    desk: Desk = request.app.state.desk
    return desk


def services_of(request: Request) -> Services:
    """Return the parts of this process."""
    return desk_of(request).services


def client_ip(request: Request) -> str | None:
    """Return where a request comes from."""
    return request.client.host if request.client else None


async def visitor_of(request: Request, needed: Role) -> Visitor:
    """Return who looks at something.

    Raises:
        LoginNeededError, RoleError: As their names say.
    """
    token = request.cookies.get(COOKIE)
    if not token:
        raise LoginNeededError
    session = await services_of(request).read(find_session, token)
    if session is None:
        raise LoginNeededError
    if not session.role.includes(needed):
        raise RoleError(needed)
    actor = f"admin:{session.name}"
    return Visitor(session.name, session.role, actor, client_ip(request), session)


async def renewed(request: Request, visitor: Visitor) -> Visitor:
    """Give a session that is due a new id; only for an answer that is certain and hands the cookie out."""
    session = visitor.session
    if session is None or not session.is_due:
        return visitor
    return replace(visitor, cookie=await services_of(request).read(rotate, session))


async def changer_of(request: Request, needed: Role, form: Mapping[str, str]) -> Visitor:
    """Return who wants to change something, after every check that a change needs.

    Raises:
        AuthenticationError, ScopeError, LoginNeededError, RoleError, ForgedRequestError: As their names say.
    """
    bearer = request.headers.get("authorization", "").partition(" ")
    if bearer[0].lower() == "bearer":
        return await key_of(request, needed, bearer[2].strip())
    visitor = await visitor_of(request, needed)
    session = visitor.session
    given = form.get(CSRF_FIELD, "")
    if session is None or not is_own_origin(request) or not session.is_csrf(given):
        raise ForgedRequestError
    return visitor


async def key_of(request: Request, needed: Role, text: str) -> Visitor:
    """Return the holder of an API key with the admin scope for a role.

    Raises:
        AuthenticationError, ScopeError: As their names say.
    """
    services, ip = services_of(request), client_ip(request)
    principal = await services.read(lambda conn: authenticate(conn, text, services.key_pepper, client_ip=ip))
    if principal is None:
        raise AuthenticationError
    if _SCOPES[needed] not in principal.scopes:
        raise ScopeError(_SCOPES[needed])
    role = Role.ADMIN if "admin:write" in principal.scopes else Role.VIEWER
    return Visitor(f"key {principal.key_id}", role, f"key:{principal.key_id}", ip)


def is_own_origin(request: Request) -> bool:
    """Tell whether a request says that it comes from one of our pages; browsers always say so with a POST."""
    own = {f"{request.url.scheme}://{request.headers.get('host', '')}"}
    public = urlsplit(services_of(request).settings.base_url)
    own.add(f"{public.scheme}://{public.netloc}")
    return request.headers.get("origin") in own


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form or of a flat JSON object; of a field given twice, the last value.

    Raises:
        FarmError: The body is too large, or neither.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise FarmError("payload_too_large", 413, f"a form has at most {MAX_FORM_BYTES} bytes")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        text = body.decode()
        if kind == "application/json":
            return _flat(json.loads(text or "{}"))
        if text and kind != "application/x-www-form-urlencoded":
            raise FarmError("unsupported_media_type", 415, "send a form or a JSON object")
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=200)
    except ValueError:
        raise FarmError("invalid_form", 400, "the form cannot be read: it is not UTF-8, or broken") from None
    return {name: value.replace("\0", "") for name, value in pairs}


def _flat(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return {
        str(name): ",".join(map(str, member)) if isinstance(member, list) else _word(member)
        for name, member in value.items()
    }


def _word(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def set_session(response: Response, request: Request, token: str) -> None:
    """Hand the cookie out: not for scripts, not with forms of other sites, only over TLS if there is."""
    response.set_cookie(
        COOKIE,
        token,
        max_age=int(LIFE_S),
        path=ROOT,
        secure=is_secure(request),
        httponly=True,
        samesite="lax",
    )


def is_secure(request: Request) -> bool:
    """Tell whether browsers reach us over TLS, here or at a proxy."""
    return request.url.scheme == "https" or services_of(request).settings.base_url.startswith("https:")


def safe_path(path: str) -> str:
    """Return a path of the dashboard to go to; everything else becomes its first page."""
    is_ours = path.startswith(HOME)
    is_plain = (
        path.isascii() and path.isprintable() and "\\" not in path and "//" not in path.partition("?")[0]
    )
    return path if is_ours and is_plain else HOME


def to_login(request: Request) -> Response:
    """Send somebody to the login, and back afterwards."""
    if request.method != "GET":
        return RedirectResponse(f"{ROOT}/login", status_code=303)
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{ROOT}/login?next={quote(safe_path(path), safe='')}", status_code=303)
