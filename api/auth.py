"""Who is calling, and may they: API keys in `Authorization: Bearer` or `X-Api-Key`, and scopes.

A good key is remembered for five seconds, so a revoked one works at most that much longer; a bad one is never
remembered. With `AUTH=none` (loopback only) every caller is one local account with all scopes.
"""

import hashlib
import ipaddress
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from fastapi import Request

from api.deps import Services, get_services
from api.rates import count_request
from farm.accounts import SCOPES, Principal, authenticate, ensure_account, parse_key
from farm.clock import monotonic_s
from farm.errors import AuthenticationError, FarmError, ScopeError
from farm.settings import Settings

CACHE_TTL_S = 5.0
CACHE_ENTRIES = 1024
LOCAL_ACCOUNT = "local"


class KeyCache:
    """The principals of the last few seconds, by a digest of key and address; oldest out first."""

    def __init__(self, clock: Callable[[], float] = monotonic_s) -> None:
        """Start empty."""
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    def get(self, text: str, client_ip: str | None) -> Principal | None:
        """Return who this is, if that is known and fresh."""
        until, principal = self._entries.get(_digest(text, client_ip), (0.0, None))
        return principal if until > self._clock() else None

    def put(
        self, text: str, client_ip: str | None, principal: Principal, *, known_s: float | None = None
    ) -> None:
        """Remember a principal for a few seconds from when the database was asked (`known_s`; now)."""
        since_s = self._clock() if known_s is None else known_s
        self._entries[_digest(text, client_ip)] = (since_s + CACHE_TTL_S, principal)
        while len(self._entries) > CACHE_ENTRIES:
            self._entries.popitem(last=False)

    def now_s(self) -> float:
        """Return the time on the cache's clock."""
        return self._clock()

    def forget(self, key_id: str) -> None:
        """Drop a key that was revoked or rotated by this process."""
        for digest, (_, principal) in list(self._entries.items()):
            if principal.key_id == key_id:
                del self._entries[digest]


def _digest(text: str, client_ip: str | None) -> bytes:
    return hashlib.sha256(f"{text} {client_ip}".encode()).digest()


def requires(scope: str) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that lets a caller through who has this scope.

    Raises:
        AuthenticationError, ScopeError, AddressError, RateLimitedError: From the dependency, before the body
        is read.
    """

    async def check(request: Request) -> Principal:
        services = get_services(request)
        principal = await _principal_of(request, services)
        await count_request(request, services, principal)
        if scope not in principal.scopes:
            raise ScopeError(scope)
        return principal

    return check


async def _principal_of(request: Request, services: Services) -> Principal:
    cache: KeyCache = request.app.state.key_cache
    client_ip = request.client.host if request.client else None
    if services.settings.auth == "none":
        _refuse_strangers(request, services.settings)
        return await _local_principal(cache, services)
    text = _key_text(request)
    if text is None or parse_key(text) is None:
        raise AuthenticationError
    known = cache.get(text, client_ip)
    if known is not None:
        return known
    pepper = services.key_pepper
    # Before the question: a revocation that commits while it is answered counts from here.
    known_s = cache.now_s()
    found = await services.read(lambda conn: authenticate(conn, text, pepper, client_ip=client_ip))
    if found is None:
        raise AuthenticationError
    cache.put(text, client_ip, found, known_s=known_s)
    return found


def _refuse_strangers(request: Request, settings: Settings) -> None:
    """Keep web pages out of a farm without keys: a browser on this machine would send their requests.

    Raises:
        FarmError: The host is no name of loopback (DNS rebinding), or the request comes from a page
        elsewhere.
    """
    origin = request.headers.get("origin")
    is_own_page = origin in {None, f"{request.url.scheme}://{request.url.netloc}", *settings.cors_origins}
    if is_own_page and _is_loopback(request.url.hostname or ""):
        return
    message = "without keys the farm answers only as 127.0.0.1 or localhost, and to no foreign web page"
    raise FarmError("ip_not_allowed", 403, message)


def _is_loopback(host: str) -> bool:
    """Tell whether a host can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _local_principal(cache: KeyCache, services: Services) -> Principal:
    known = cache.get(LOCAL_ACCOUNT, None)
    if known is None:
        account_id = await services.read(ensure_account, LOCAL_ACCOUNT)
        known = Principal(account_id=account_id, key_id=LOCAL_ACCOUNT, scopes=frozenset(SCOPES))
        cache.put(LOCAL_ACCOUNT, None, known)
    return known


def _key_text(request: Request) -> str | None:
    scheme, _, rest = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    return request.headers.get("x-api-key")
