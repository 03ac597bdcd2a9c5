"""How the devices of a group are, and how busy the group was: a thread that keeps asking NVML.

A driver that hangs must hold up neither the heartbeat nor a job, so only this thread talks to it. Before each
claim the agent asks for a fresh answer; none within a few seconds is an answer too. What a problem leads to
is the agent's business. The figures of the last hour are kept here and go into the group's row (`stats`).
"""

import threading
from collections import deque
from collections.abc import Callable
from statistics import mean
from typing import Any

import structlog

from farm.clock import monotonic_s
from worker.nvml import DeviceReader, Reading

log = structlog.get_logger(__name__)

EVERY_S = 10.0
ANSWER_S = 5.0
HOUR_S = 3600.0


class BusyTime:
    """Which share of the last hour, or of its own life if shorter, something was busy."""

    def __init__(self, clock: Callable[[], float] = monotonic_s) -> None:
        """Begin idle."""
        self._clock = clock
        self._started = clock()
        self._busy_since: float | None = None
        self._spans: deque[tuple[float, float]] = deque()

    def note(self, *, is_busy: bool) -> None:
        """Tell how it is from now on."""
        now = self._clock()
        if is_busy and self._busy_since is None:
            self._busy_since = now
        elif not is_busy and self._busy_since is not None:
            self._spans.append((self._busy_since, now))
            self._busy_since = None

    def ratio(self) -> float:
        """Return the share, from 0 to 1."""
        now = self._clock()
        begin = max(self._started, now - HOUR_S)
        while self._spans and self._spans[0][1] <= begin:
            self._spans.popleft()
        spans = [*self._spans, *([(self._busy_since, now)] if self._busy_since is not None else [])]
        busy_s = sum(end - max(start, begin) for start, end in spans)
        return round(busy_s / (now - begin), 3) if now > begin else 0.0


class HealthMonitor:
    """The thread and its newest reading."""

    def __init__(self, reader: DeviceReader, *, every_s: float = EVERY_S, answer_s: float = ANSWER_S) -> None:
        """Prepare; nothing is asked yet."""
        self._reader = reader
        self._every_s = every_s
        self._answer_s = answer_s
        self._changed = threading.Condition()
        self._reading = Reading([], "not read yet")
        self._num_read = 0
        self._num_wanted = 0
        self._is_stopping = False
        self._uses: deque[float] = deque(maxlen=max(1, round(HOUR_S / every_s)))
        self._thread = threading.Thread(target=self._read_forever, name="health", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; a driver that hangs is not waited for."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def check(self) -> str:
        """Ask anew; return why the group must not work, or nothing."""
        with self._changed:
            self._num_wanted = wanted = self._num_read + 1
            self._changed.notify_all()
            has_answered = self._changed.wait_for(lambda: self._num_read >= wanted, self._answer_s)
            return (
                self._reading.problem if has_answered else f"NVML has not answered for {self._answer_s:g} s"
            )

    def stats(self) -> dict[str, Any]:
        """Return the newest reading for the group's row."""
        with self._changed:
            use = round(mean(self._uses), 1) if self._uses else None
            return {**self._reading.to_json(), "problem": self._reading.problem, "utilization_1h": use}

    def device_memory_mb(self) -> list[int]:
        """Return the device memory in use, one figure a device that tells."""
        with self._changed:
            used = [device.memory_used_bytes for device in self._reading.devices]
        return [round(value / 2**20) for value in used if value is not None]

    def _read_forever(self) -> None:
        while True:
            reading = self._reader.read()
            uses = [device.utilization_percent for device in reading.devices]
            known = [use for use in uses if use is not None]
            with self._changed:
                self._reading = reading
                self._num_read += 1
                if known:
                    self._uses.append(mean(known))
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._is_stopping or self._num_wanted > self._num_read, self._every_s
                )
                if self._is_stopping:
                    break
        self._reader.close()
