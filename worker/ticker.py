"""`python -m worker.ticker`: the beat role: relay, sweeps, webhook sender.

Each has a thread of its own, so a slow store or broker holds up nothing else; whatever goes wrong in a loop
is logged and tried again after a pause. Any number of tickers may run beside each other. SIGTERM and SIGINT
end it with status 0.
"""

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from farm.db import schema
from farm.db.listen import Listener
from farm.db.session import make_engine
from farm.doorbell import DoorbellError, make_celery, publish_doorbell
from farm.errors import FarmError
from farm.metrics.exporter import MetricsServer
from farm.metrics.families import SWEEP_SECONDS, SWEEP_SUCCESS
from farm.outbox import BATCH, CHANNEL, Publish, PublishError, relay_once
from farm.profiles import load_profiles
from farm.retention import Retention
from farm.settings import Settings, load_settings
from farm.storage import ObjectStore
from farm.telemetry import configure_logging
from farm.tracing import close_tracing, configure_tracing
from worker import webhook_sender
from worker.sweeps import SWEEPS, Sweep, Sweeper

log = structlog.get_logger(__name__)

RELAY_POLL_S = 1.0
BROKEN_S = 1.0
SENDER_BROKEN_S = 5.0
GOODBYE_S = 10.0
READY_S = 60.0


class Ticker:
    """All loops of one ticker process."""

    def __init__(self, settings: Settings) -> None:
        """Make the parts; nothing runs yet."""
        self.stop = threading.Event()
        self._swept_at = -READY_S
        self._settings = settings
        self._engine = make_engine(settings, application="ticker", pool_size=len(SWEEPS) + 1)
        retention = Retention(settings.retention.job_days, settings.retention.event_days)
        profiles = load_profiles(settings.profiles_file)
        self._sweeper = Sweeper(self._engine, ObjectStore(settings), settings.rules(), retention, profiles)
        self._threads = [
            threading.Thread(target=self._guarded, args=("relay", self._relay, BROKEN_S), daemon=True),
            threading.Thread(
                target=self._guarded, args=("webhooks", self._send, SENDER_BROKEN_S), daemon=True
            ),
            *(threading.Thread(target=self._sweep, args=(sweep,), daemon=True) for sweep in SWEEPS),
        ]

    def start(self) -> None:
        """Start all loops."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all loops; one that is stuck is left behind after a while."""
        self.stop.set()
        give_up_s = time.monotonic() + GOODBYE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, give_up_s - time.monotonic()))
        self._engine.dispose()

    @property
    def is_ready(self) -> bool:
        """Tell whether the sweeps reach the database."""
        return not self.stop.is_set() and time.monotonic() - self._swept_at < READY_S

    def _relay(self) -> None:
        """Publish what is committed, at once when told so and every second anyway."""
        publish = doorbell_publisher(self._settings)
        with Listener(self._settings, CHANNEL) as listener:
            while not self.stop.is_set():
                if relay_once(self._engine, publish) < BATCH:
                    listener.wait(RELAY_POLL_S, self.stop)

    def _send(self) -> None:
        webhook_sender.run(self._settings, self.stop)

    def _sweep(self, sweep: Sweep) -> None:
        while not self.stop.is_set():
            try:
                with SWEEP_SECONDS.labels(sweep.name).time():
                    num_changed = sweep.run(self._sweeper)
                SWEEP_SUCCESS.labels(sweep.name).set_to_current_time()
                self._swept_at = time.monotonic()
            except Exception as exc:
                log.error("sweep_failed", sweep=sweep.name, err=type(exc).__name__, exc_info=_unexpected(exc))
            else:
                if num_changed and not sweep.is_quiet:
                    log.info("swept", sweep=sweep.name, num_changed=num_changed)
            self.stop.wait(sweep.every_s)

    def _guarded(self, name: str, act: Callable[[], None], pause_s: float) -> None:
        """Run a loop that ends only by `stop`, and start it again when it fails."""
        while not self.stop.is_set():
            try:
                act()
            except Exception as exc:
                log.error("loop_failed", loop=name, err=type(exc).__name__, exc_info=_unexpected(exc))
                self.stop.wait(pause_s)


def doorbell_publisher(settings: Settings) -> Publish:
    """Return a function that rings through the broker, or says that it could not."""
    app = make_celery(settings)

    def publish(job_id: str, profile: str) -> None:
        try:
            publish_doorbell(app, job_id, profile)
        except DoorbellError as exc:
            raise PublishError(str(exc)) from exc

    return publish


def main() -> int:
    """Run a ticker until SIGTERM or SIGINT; return the exit status."""
    try:
        settings = load_settings()
        configure_logging(settings, service="ticker")
        configure_tracing(settings, service="ticker")
        settings.require("secret_key")
        ticker = Ticker(settings)
        _check_schema(settings)
    except FarmError as exc:
        sys.stderr.write(f"{exc.message}\n")
        return 1
    # A SimpleQueue may be filled by a signal handler that interrupts its reader; an event may not.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signals.put(received))
    metrics = MetricsServer(settings.metrics, lambda: ticker.is_ready)
    ticker.start()
    log.info("ticker_started")
    log.info("ticker_stopping", signal=signal.Signals(signals.get()).name)
    ticker.close()
    metrics.close()
    close_tracing()
    return 0


def _check_schema(settings: Settings) -> None:
    """Refuse an old schema; a database that is away is waited for by the loops."""
    engine = make_engine(settings, application="ticker", pool_size=1)
    try:
        with engine.connect() as conn:
            found = schema.status(conn)
    except SQLAlchemyError as exc:
        log.warning("database_unreachable", err=type(exc).__name__)
        return
    finally:
        engine.dispose()
    if found.is_newer:
        log.warning("schema_is_newer", current=found.current, newest=found.newest)
    if not found.is_usable:
        raise FarmError(
            "schema", 503, f"the schema is at {found.current}, not {found.newest}: run magi2-farm migrate"
        )


def _unexpected(exc: Exception) -> Exception | None:
    """Show a traceback for defects; a database or a store that is away needs one line only."""
    return None if isinstance(exc, SQLAlchemyError | FarmError) else exc


if __name__ == "__main__":
    sys.exit(main())
