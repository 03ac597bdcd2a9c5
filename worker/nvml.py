"""What the driver says of a group's devices, read through NVML without torch.

Every figure may be missing: without a driver there is one sentence that says so and nothing else, and a
figure that a device does not report is None. `problem` is set only by what makes a device unfit for work: it
is gone, it has met an uncorrectable memory error, or an Xid that no program of a user causes.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pynvml

# Xids that a kernel or a killed process causes; all other critical ones speak of the device or its links.
PROGRAM_XIDS = frozenset({13, 31, 43, 45})
# Clock reasons that tell of heat or power, by their bit.
THROTTLING = {
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


@dataclass(frozen=True)
class DeviceReading:
    """One device, as far as it tells."""

    index: int
    name: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    ecc_uncorrected: int | None = None
    throttling: list[str] = field(default_factory=list)
    xid: int | None = None  # the newest critical one since the agent started
    problem: str = ""


@dataclass(frozen=True)
class Reading:
    """All devices of a group; `note` says why there is nothing to read."""

    devices: list[DeviceReading]
    note: str = ""

    @property
    def problem(self) -> str:
        """Return why the group must not work; empty when nothing speaks against it."""
        return next((device.problem for device in self.devices if device.problem), "")

    def to_json(self) -> dict[str, Any]:
        """Return what goes into the group's row."""
        return {"devices": [asdict(device) for device in self.devices], "note": self.note}


class DeviceReader:
    """Reads the devices of one group, numbered as the driver numbers them; one thread at a time."""

    def __init__(self, devices: Sequence[int], library: Any = pynvml) -> None:
        """Open the driver's library, if there is one."""
        self._library = library
        self._devices = tuple(devices)
        self._note = "" if devices else "no devices"
        self._xids: dict[int, int] = {}
        self._events: Any = None
        if not devices:
            return
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            self._note = f"NVML cannot be used: {error}"
            return
        self._watch_xids()

    def read(self) -> Reading:
        """Ask every device."""
        if self._note:
            return Reading([], self._note)
        self._collect_xids()
        return Reading([self._read(index) for index in self._devices])

    def close(self) -> None:
        """Let go of the library."""
        if not self._note:
            self._ask(self._library.nvmlShutdown)

    def _read(self, index: int) -> DeviceReading:
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            memory = library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError as error:
            return DeviceReading(index, problem=f"device {index} is missing: {error}")
        utilization = self._ask(library.nvmlDeviceGetUtilizationRates, handle)
        uncorrected = self._ask(
            library.nvmlDeviceGetTotalEccErrors,
            handle,
            library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            library.NVML_VOLATILE_ECC,
        )
        reasons = self._ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        xid = self._xids.get(index)
        return DeviceReading(
            index=index,
            name=self._ask(library.nvmlDeviceGetName, handle),
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            utilization_percent=None if utilization is None else int(utilization.gpu),
            temperature_c=self._ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
            ecc_uncorrected=uncorrected,
            throttling=[name for bit, name in THROTTLING.items() if reasons & bit],
            xid=xid,
            problem=_problem_of(index, uncorrected, xid),
        )

    def _watch_xids(self) -> None:
        library = self._library
        self._events = self._ask(library.nvmlEventSetCreate)
        for index in self._devices:
            handle = self._ask(library.nvmlDeviceGetHandleByIndex, index)
            if handle is not None and self._events is not None:
                kind = library.nvmlEventTypeXidCriticalError
                self._ask(library.nvmlDeviceRegisterEvents, handle, kind, self._events)

    def _collect_xids(self) -> None:
        """Take the events that have come up to now; a program's own never hides one of the device."""
        library = self._library
        while self._events is not None:
            event = self._ask(library.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                return
            index = self._ask(library.nvmlDeviceGetIndex, event.device)
            if index is not None and self._xids.get(index) in {None, *PROGRAM_XIDS}:
                self._xids[index] = int(event.eventData)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return an answer, or None from a driver or device that has none."""
        try:
            return call(*arguments)
        except self._library.NVMLError:
            return None


def _problem_of(index: int, uncorrected: int | None, xid: int | None) -> str:
    if uncorrected:
        return (
            f"device {index} has met {uncorrected} uncorrectable memory errors since its last reset: "
            "reset it, then restart the ranks of this group"
        )
    if xid is not None and xid not in PROGRAM_XIDS:
        return f"device {index} reported Xid {xid}: look it up, reset the device, then restart the ranks"
    return ""
