"""Live progress over Redis: the newest report of each job, and a channel for those who listen.

Best effort by design: at most two messages a second per job, short time-outs, and a pause after a
failure. Nothing is decided by what is read here; the same numbers reach PostgreSQL with the heartbeat.
"""

import json
from collections.abc import Callable
from typing import Any

import redis
import structlog

from farm.clock import monotonic_s

log = structlog.get_logger(__name__)

CHANNEL = "magi2:progress"
TTL_S = 600
MIN_INTERVAL_S = 0.5
PAUSE_S = 10.0
TIMEOUT_S = 1.0


def progress_key(job_id: str) -> str:
    """Return the key under which the newest report of a job lives for a while."""
    return f"magi2:progress:{job_id}"


def decode(data: bytes | str) -> dict[str, Any]:
    """Read a message of `CHANNEL` or the value of a key: id, epoch, phase, step, total, progress."""
    value: dict[str, Any] = json.loads(data)
    return value


class ProgressPublisher:
    """Publishes reports of one agent; never raises and never holds it up for long."""

    def __init__(self, redis_url: str, *, clock: Callable[[], float] = monotonic_s) -> None:
        """Prepare a client; nothing is contacted yet."""
        self._client = redis.Redis.from_url(
            redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None
        )
        self._clock = clock
        self._not_before = 0.0
        self._waiting: tuple[str, str] | None = None

    def publish(self, job_id: str, report: dict[str, Any]) -> None:
        """Send a report, now or at a later `flush`; a newer report takes the place of a waiting one."""
        self._waiting = (job_id, json.dumps({"id": job_id, **report}, separators=(",", ":")))
        self.flush()

    def flush(self) -> None:
        """Send the waiting report, if there is one and the last one was not a moment ago."""
        if self._waiting is None or self._clock() < self._not_before:
            return
        (job_id, text), self._waiting = self._waiting, None
        try:
            with self._client.pipeline(transaction=False) as pipe:
                pipe.set(progress_key(job_id), text, ex=TTL_S)
                pipe.publish(CHANNEL, text)
                pipe.execute()
            self._not_before = self._clock() + MIN_INTERVAL_S
        except redis.RedisError as error:
            log.warning("progress_not_published", job_id=job_id, err=type(error).__name__)
            self._not_before = self._clock() + PAUSE_S

    def clear(self, job_id: str) -> None:
        """Forget a job that has ended, as far as the broker is there to listen."""
        self._waiting, self._not_before = None, 0.0
        try:
            self._client.delete(progress_key(job_id))
        except redis.RedisError as error:
            log.warning("progress_not_cleared", job_id=job_id, err=type(error).__name__)

    def close(self) -> None:
        """Give the connection back."""
        self._client.close()
