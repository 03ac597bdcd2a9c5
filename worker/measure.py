"""Memory while an attempt runs, where an operator asks for it (`WORKER__MEASURE`): sampling costs time.

The peak of the host is the PSS of the agent and of all that it has started; that of the devices is what the
driver says is in use, one figure a device. What nobody tells is None, or an empty list.
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from magi2.host_memory import PeakPss

EVERY_S = 1.0


class MemoryWatch:
    """Watches from `with` to its end; `peaks` is what was seen."""

    def __init__(self, device_memory_mb: Callable[[], list[int]], *, every_s: float = EVERY_S) -> None:
        """Prepare; `device_memory_mb` gives one figure a device, or none."""
        self._host = PeakPss(os.getpid(), period_s=every_s)
        self._device_memory_mb = device_memory_mb
        self._every_s = every_s
        self._devices_mb: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch_devices, name="device-memory", daemon=True)

    def __enter__(self) -> Self:
        self._host.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._host.__exit__(kind, error, trace)
        self._thread.join()

    def peaks(self) -> dict[str, Any]:
        """Return the highest figures in MiB, as `job_attempt.measured` holds them."""
        host = self._host.peak_bytes
        return {
            "host_pss_mb": None if host is None else round(host / 2**20),
            "device_memory_mb": list(self._devices_mb),
            "num_samples": self._host.num_samples,
        }

    def _watch_devices(self) -> None:
        while True:
            devices = self._device_memory_mb()
            before = self._devices_mb or [0] * len(devices)
            if len(devices) == len(before):  # a device that stops to tell does not shift the others
                self._devices_mb = [max(pair) for pair in zip(devices, before, strict=True)]
            if self._stopping.wait(self._every_s):
                return
