"""`python -m api`: serves until SIGTERM or SIGINT, then answers what is in flight and exits 0."""

import signal
import sys
from types import FrameType

import uvicorn

from api.app import create_app
from farm.errors import SettingsError
from farm.settings import load_settings
from farm.telemetry import configure_logging
from farm.tracing import close_tracing, configure_tracing

# Requests that wait (long polls) answer at the first signal; this bounds uploads and downloads.
SHUTDOWN_GRACE_S = 8
KEEP_ALIVE_S = 75


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def main() -> int:
    """Run one api process."""
    try:
        settings = load_settings()
        configure_logging(settings, service="api")
        configure_tracing(settings, service="api")
        app = create_app(settings)
    except SettingsError as exc:
        sys.stderr.write(f"api: {exc.message}\n")
        return 2
    config = uvicorn.Config(
        app,
        host=settings.api_host,
        port=settings.api_port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
    )
    # After its clean end the server raises the signal that stopped it once more, for the handlers that were
    # there before its own: with the default ones the process would die by it instead of exiting with 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    server = uvicorn.Server(config)
    app.state.services.is_stopping = lambda: server.should_exit
    server.run()
    close_tracing()
    return 0


if __name__ == "__main__":
    sys.exit(main())
