"""The Celery side of an agent: a consumer in a thread of its own that turns messages into rings.

It waits for the broker for ever and is started again if it breaks; work is found without it, by polling. It
installs no signal handlers: the agent owns SIGTERM and SIGINT. Told by Celery's own tools to shut down, it
asks the agent to drain.
"""

import threading
from collections.abc import Callable
from typing import Any

import structlog
from celery import Celery
from celery.exceptions import WorkerShutdown
from celery.platforms import EX_OK
from celery.worker import WorkController, state

from farm.doorbell import Ring, make_celery, queue_of
from farm.settings import Settings

log = structlog.get_logger(__name__)

RESTART_PAUSE_S = 5.0
STOP_TIMEOUT_S = 5.0


class _Controller(WorkController):  # type: ignore[misc]  # celery has no types
    """A Celery worker without signal handlers, which leaves its event loop when it is told to."""

    def leave_when(self, stopping: threading.Event) -> None:
        """Remember what to look at in every turn of the loop."""
        self._stopping = stopping

    def register_with_event_loop(self, hub: Any) -> None:
        """Look at the wish to stop in every turn; Celery's own flag belongs to the whole process."""
        super().register_with_event_loop(hub)
        hub.on_tick.add(self._leave_if_asked)

    def _leave_if_asked(self) -> None:
        if self._stopping.is_set():
            raise WorkerShutdown(EX_OK)


class DoorbellConsumer:
    """Listens for doorbells of one profile."""

    def __init__(
        self, settings: Settings, profile: str, group_id: str, *, ring: Ring, on_shutdown: Callable[[], None]
    ) -> None:
        """Prepare the app; nothing is contacted yet."""
        self._profile = profile
        self._name = f"{profile}@{group_id}"
        self._on_shutdown = on_shutdown
        self._app: Celery = make_celery(settings, ring=ring)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._consume_forever, name="doorbells", daemon=True)

    def start(self) -> None:
        """Start listening; returns at once, whether the broker is there or not."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; a broker that hangs is not waited for longer than a moment."""
        self._stopping.set()
        state.should_stop = EX_OK  # the only thing that a wait for the broker looks at
        self._thread.join(STOP_TIMEOUT_S)
        state.should_stop = None
        self._app.close()

    def _consume_forever(self) -> None:
        # The pool's threads look up tasks in the default app.
        self._app.set_default()
        while not self._stopping.is_set():
            exit_code = self._consume()
            if self._stopping.is_set():
                return
            if exit_code == EX_OK:
                log.info("shutdown_by_remote_control")
                self._on_shutdown()
                return
            log.warning("consumer_ended", exit_code=exit_code, pause_s=RESTART_PAUSE_S)
            self._stopping.wait(RESTART_PAUSE_S)

    def _consume(self) -> int | None:
        worker = _Controller(
            app=self._app,
            hostname=self._name,
            queues=[queue_of(self._profile)],
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        worker.leave_when(self._stopping)
        worker.start()
        exit_code: int | None = worker.exitcode
        return exit_code
