"""One POST to a receiver: pinned to the checked address, bounded in time and size, never redirected.

Promises: the connection goes to the address that the guard returned and to no other, under the name that the
user gave (TLS SNI, certificate, `Host`); nothing is read from the environment, no connection is used twice,
and what the receiver answers is read up to 64 KiB. Knows nothing of deliveries, secrets or the database.
"""

import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import httpx

from farm.clock import now
from farm.webhooks.deliveries import EXCERPT_CHARS, Outcome
from farm.webhooks.guard import Target

CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024
USER_AGENT = "magi2-farm-webhooks/1"


def make_client(max_connections: int, tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """Return a client that reads nothing from the environment and keeps no connection open.

    A kept connection would serve another name at the same address, whose certificate nobody checked.
    """
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(verify=tls or True, trust_env=False, limits=limits, timeout=timeout)


class Post:
    """One attempt at one address; `outcome` may be asked for at any time, also when it was interrupted."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        """Start the clock."""
        self._client = client
        self._started_s = time.monotonic()
        self._answer: httpx.Response | None = None
        self._excerpt = bytearray()
        self._ip: str | None = None

    async def send(self, target: Target, body: bytes, headers: Mapping[str, str]) -> None:
        """Send the body and read the answer to its end, or to the limit.

        Raises:
            httpx.HTTPError, httpx.InvalidURL: It could not be sent, or no whole answer came back.
        """
        self._ip = target.ip
        own = {
            "host": target.host_header,
            "content-type": "application/json",
            "user-agent": USER_AGENT,
            "accept": "*/*",
            "accept-encoding": "identity",
        }
        request = self._client.build_request(
            "POST", pinned_url(target), content=body, headers={**headers, **own}
        )
        if target.scheme == "https":
            # The name goes into SNI and the certificate check; the connection to the checked address.
            request.extensions["sni_hostname"] = target.host
        self._answer = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            await self._read(self._answer)
        finally:
            await self._answer.aclose()

    def outcome(self, error: str | None = None) -> Outcome:
        """Return what came of it; an answer that is not 2xx is an error by itself."""
        status = self._answer.status_code if self._answer is not None else None
        if error is None and (self._answer is None or not self._answer.is_success):
            error = f"http_{status}"
        return Outcome(
            duration_ms=round((time.monotonic() - self._started_s) * 1000),
            http_status=status,
            error=error,
            excerpt=bytes(self._excerpt).decode("utf-8", errors="replace").replace("\x00", "") or None,
            resolved_ip=self._ip,
            retry_after_s=retry_after_s(self._answer.headers) if self._answer is not None else None,
        )

    async def _read(self, answer: httpx.Response) -> None:
        read_bytes = 0
        async for chunk in answer.aiter_raw():
            read_bytes += len(chunk)
            self._excerpt += chunk[: EXCERPT_CHARS - len(self._excerpt)]
            if read_bytes >= MAX_ANSWER_BYTES:
                break


def pinned_url(target: Target) -> str:
    """Return the URL that connects to the checked address itself."""
    address = f"[{target.ip}]" if ":" in target.ip else target.ip
    return f"{target.scheme}://{address}:{target.port}{target.path}"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read Retry-After in either form; None when it is absent or makes no sense."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, (parsedate_to_datetime(text) - now()).total_seconds())
    except (TypeError, ValueError):
        return None


def transport_error(exc: httpx.HTTPError | httpx.InvalidURL) -> str:
    """Return a stable word that names no address."""
    if _is_tls(exc):
        return "tls_failed"
    known = (
        (httpx.ConnectTimeout, "connect_timeout"),
        (httpx.ConnectError, "connect_failed"),
        (httpx.TimeoutException, "timeout"),
        (httpx.InvalidURL, "refused_syntax"),
    )
    return next((word for kind, word in known if isinstance(exc, kind)), "connection_broken")


def _is_tls(exc: BaseException) -> bool:
    """Look for a failed handshake below the layers of the client."""
    below = exc.__cause__ or exc.__context__
    return below is not None and (isinstance(below, ssl.SSLError) or _is_tls(below))
