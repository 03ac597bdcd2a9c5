"""Who may read `/metrics`, and the small server on which ticker and worker offer theirs.

With a token it must be given as a Bearer key. Without one, only this machine may ask, and no proxy of it:
the numbers tell how busy a farm is. The api has `/metrics` on its own port (`api/routes/metrics.py`).
"""

import hmac
import ipaddress
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from pydantic import SecretStr

from farm.metrics.families import REGISTRY
from farm.settings import MetricsSettings

log = structlog.get_logger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
PATH = "/metrics"


def exposition(more: Iterable[Collector] = ()) -> bytes:
    """Return what this process counted, and what else was read, as text for Prometheus."""
    read = CollectorRegistry(auto_describe=False)
    for collector in more:
        read.register(collector)
    return generate_latest(REGISTRY) + generate_latest(read)


def may_read(
    token: SecretStr | None, authorization: str | None, client: str | None, *, is_forwarded: bool
) -> bool:
    """Decide about a scrape.

    Args:
        token: The configured one, if any.
        authorization: The header of the request.
        client: Address of the other end of the connection.
        is_forwarded: The request came through a proxy, so `client` is not who asks.
    """
    if token is not None:
        given = (authorization or "").removeprefix("Bearer ").encode()
        return hmac.compare_digest(given, token.get_secret_value().encode())
    try:
        return not is_forwarded and ipaddress.ip_address(client or "").is_loopback
    except ValueError:
        return False


class MetricsServer:
    """Serves `/metrics` of this process in a thread, if a port is set for it."""

    def __init__(self, settings: MetricsSettings) -> None:
        """Bind the port.

        Raises:
            OSError: It is taken.
        """
        self._server: ThreadingHTTPServer | None = None
        if settings.port is None:
            return
        handler = type("Handler", (_Handler,), {"token": settings.token})
        self._server = ThreadingHTTPServer((settings.host, settings.port), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics_served", host=settings.host, port=settings.port)

    def close(self) -> None:
        """Give the port back."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    token: SecretStr | None = None
    timeout = 10

    def do_GET(self) -> None:
        forwarded = "X-Forwarded-For" in self.headers or "Forwarded" in self.headers
        authorization = self.headers.get("Authorization")
        if self.path.partition("?")[0] != PATH:
            self._answer(404, b"")
        elif not may_read(self.token, authorization, self.client_address[0], is_forwarded=forwarded):
            self._answer(401, b"")
        else:
            self._answer(200, exposition())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        """Write nothing: a scrape every few seconds is no news."""
