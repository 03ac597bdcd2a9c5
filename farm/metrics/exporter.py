"""Who may read `/metrics`, and the small server of ticker and worker: metrics, and whether they are ready.

With a token it must be given as a Bearer key. Without one, only this machine may ask, and no proxy of it:
the numbers tell how busy a farm is.
`/livez` and `/readyz` say one word and are open. The api has all three on its own port.
"""

import hmac
import ipaddress
import threading
from collections.abc import Callable, Iterable
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
    """Serves `/metrics`, `/livez` and `/readyz` of this process in a thread, if a port is set for it."""

    def __init__(self, settings: MetricsSettings, is_ready: Callable[[], bool]) -> None:
        """Bind the port.

        Args:
            settings: Where, and for whom.
            is_ready: Tells whether the role does its work now; asked from any thread.

        Raises:
            OSError: The port is taken.
        """
        self._server: ThreadingHTTPServer | None = None
        if settings.port is None:
            return
        handler = type("Handler", (_Handler,), {"token": settings.token, "is_ready": staticmethod(is_ready)})
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
    is_ready: Callable[[], bool]
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/livez":
            self._answer(200, b"alive\n")
        elif path == "/readyz":
            ready = self.is_ready()
            self._answer(200 if ready else 503, b"ready\n" if ready else b"not ready\n")
        elif path == PATH:
            self._offer_metrics()
        else:
            self._answer(404, b"")

    def _offer_metrics(self) -> None:
        forwarded = "X-Forwarded-For" in self.headers or "Forwarded" in self.headers
        authorization = self.headers.get("Authorization")
        if may_read(self.token, authorization, self.client_address[0], is_forwarded=forwarded):
            self._answer(200, exposition())
        else:
            self._answer(401, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", CONTENT_TYPE if self.path.startswith(PATH) else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        """Write nothing: a scrape every few seconds is no news."""
