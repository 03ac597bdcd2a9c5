"""Celery over Redis as a doorbell: one task named `render` that says "look for work in this profile".

The message names a job for tracing and for Celery's own tools; the claim in PostgreSQL decides what
runs. So a message may be lost, doubled, late or stale without harm, the task only rings and never
raises, and there is no result backend, no `eta`, no retry and no revoke. Each setting below says why it
is as it is.
"""

from collections.abc import Callable
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from farm.settings import Settings

TASK = "render"
VISIBILITY_TIMEOUT_S = 3600
PUBLISH_TIMEOUT_S = 2.0


class DoorbellError(Exception):
    """The broker did not take a message; the row that asked for it waits in the database."""


Ring = Callable[[str, str], None]


def queue_of(profile: str) -> str:
    """Return the name of a profile's queue, which is also its Redis key."""
    return f"magi2.render.{profile}"


def make_celery(settings: Settings, *, ring: Ring | None = None) -> Celery:
    """Build the Celery app: with `ring` for an agent that listens, without for one that only publishes."""
    app = Celery("magi2-farm", broker=settings.redis_url, set_as_current=False)
    app.conf.update(_common_settings())
    app.conf.broker_transport_options = _listener_transport() if ring else _publisher_transport()

    # Not shared: a shared task would be registered with every other app of the process too.
    @app.task(name=TASK, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]  # celery has no types
    def render(job_id: str, profile: str) -> None:
        if ring is not None:
            ring(job_id, profile)

    return app


def publish_doorbell(app: Celery, job_id: str, profile: str) -> None:
    """Ring once.

    Raises:
        DoorbellError: The broker did not take the message within seconds.
    """
    try:
        app.send_task(
            TASK,
            kwargs={"job_id": job_id, "profile": profile},
            queue=queue_of(profile),
            retry=False,
            ignore_result=True,
            argsrepr="",  # the representations would double the size of the message
            kwargsrepr="",
        )
    except (OperationalError, OSError) as error:
        raise DoorbellError("the broker did not take the doorbell") from error


def _common_settings() -> dict[str, Any]:
    return {
        # A thread pool of one: rings return at once; no fork, and no time limits to be tempted by.
        "worker_pool": "threads",
        "worker_concurrency": 1,
        # With early ack and a prefetched message, a busy worker holds what an idle one could answer.
        "task_acks_late": True,
        "worker_prefetch_multiplier": 1,
        # Recovery of work is the lease's job, never the broker's.
        "task_reject_on_worker_lost": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        # No results: nothing to expire, nothing to wait for.
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        "result_backend": None,
        # Wait for the broker for ever.
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # Celery's own tools may ask an agent what it does; events are not used and would leave keys behind.
        "worker_enable_remote_control": True,
        "worker_send_task_events": False,
        "task_send_sent_event": False,
        # JSON only, so that no message is ever a pickle.
        "task_serializer": "json",
        "accept_content": ["json"],
        # The agent configures its own logs.
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


def _listener_transport() -> dict[str, Any]:
    return {
        # With late ack, a message that is held longer than this is delivered again.
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        # Half-open connections are noticed.
        "socket_timeout": 30,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 25,
    }


def _publisher_transport() -> dict[str, Any]:
    return {
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        # A relay must not hang on a broker that is away; its rows wait in the database.
        "socket_timeout": PUBLISH_TIMEOUT_S,
        "socket_connect_timeout": PUBLISH_TIMEOUT_S,
        "retry_on_timeout": False,
        "max_retries": 0,
    }
