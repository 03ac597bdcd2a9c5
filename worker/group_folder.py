"""The folder of one group on its host: id, locks, pids of the ranks, their logs, temporary files.

The id survives restarts, so the group's row, its failures and its drain keep their name. Locks hold as
long as the agent's process. Leftover ranks of an agent that died are found by pid, start time and boot
id, all three, and only those are killed: never anything by name.
"""

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.ids import is_id, new_id
from worker.devices import DeviceError

MAX_CPU_SLOTS = 64
KILL_TIMEOUT_S = 10.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessMark:
    """A process named so that no later one can be taken for it."""

    pid: int
    started: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessMark | None":
        """Return the mark of a live process; None if there is none, or only its remains."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
        if fields[0] in {"Z", "X"}:
            return None
        return cls(pid, int(fields[19]), BOOT_ID.read_text(encoding="ascii").strip())

    def is_alive(self) -> bool:
        """Tell whether exactly this process still runs."""
        return ProcessMark.of(self.pid) == self


class GroupFolder:
    """The folder, held by one agent at a time."""

    def __init__(self, root: Path, locks: Sequence[int]) -> None:
        self._root = root
        self._locks = locks
        self.group_id = self._read_id()

    @property
    def log_dir(self) -> Path:
        """Where the ranks' output goes."""
        return self._root / "logs"

    @property
    def work_dir(self) -> Path:
        """Where attempts keep their files; emptied when an agent starts."""
        return self._root / "work"

    def tidy(self) -> list[int]:
        """Kill what an agent that died has left running, empty its work folder, and return the pids killed.

        Raises:
            DeviceError: A leftover process does not die; it may still hold a device.
        """
        killed = [mark.pid for mark in self._recorded() if _kill(mark)]
        shutil.rmtree(self.work_dir, ignore_errors=True)
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.record([])
        return killed

    def record(self, pids: Sequence[int]) -> None:
        """Write down which rank processes run now, in one step."""
        marks = [mark for mark in map(ProcessMark.of, pids) if mark is not None]
        partial = self._pid_file.with_suffix(".new")
        partial.write_text(json.dumps([vars(mark) for mark in marks]), encoding="ascii")
        partial.replace(self._pid_file)

    def release(self) -> None:
        """Let another agent have the devices."""
        for descriptor in self._locks:
            os.close(descriptor)

    @property
    def _pid_file(self) -> Path:
        return self._root / "ranks.json"

    def _recorded(self) -> list[ProcessMark]:
        try:
            marks: list[dict[str, Any]] = json.loads(self._pid_file.read_text(encoding="ascii"))
            return [ProcessMark(**mark) for mark in marks]
        except (OSError, ValueError, TypeError):  # none yet, or half written before a power cut
            return []

    def _read_id(self) -> str:
        file = self._root / "group_id"
        text = file.read_text(encoding="ascii").strip() if file.exists() else ""
        if not is_id(text, "group"):
            text = new_id("group")
            file.write_text(text, encoding="ascii")
        return text


def take_folder(state_dir: Path, profile: str, devices: Sequence[int]) -> GroupFolder:
    """Take the folder of a profile on these devices; without devices, the first one that is free.

    Raises:
        DeviceError: Another agent of this host holds a device, or all folders.
    """
    base = state_dir.absolute() / "worker"
    base.mkdir(parents=True, exist_ok=True)
    if devices:
        locks = [_lock_device(base, device) for device in devices]
        name = f"{profile}-{'_'.join(str(device) for device in devices)}"
        return _open_folder(base / name, locks)
    for slot in range(MAX_CPU_SLOTS):
        lock = _try_lock(base / f"{profile}-cpu{slot}.lock")
        if lock is not None:
            return _open_folder(base / f"{profile}-cpu{slot}", [lock])
    raise DeviceError(
        f"{MAX_CPU_SLOTS} agents of profile {profile} already run from {state_dir}; stop one of them"
    )


def _open_folder(root: Path, locks: Sequence[int]) -> GroupFolder:
    root.mkdir(mode=0o700, exist_ok=True)
    return GroupFolder(root, locks)


def _lock_device(base: Path, device: int) -> int:
    lock = _try_lock(base / f"device{device}.lock")
    if lock is None:
        raise DeviceError(
            f"device {device} belongs to another agent of this host; stop it or choose another device"
        )
    return lock


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _kill(mark: ProcessMark) -> bool:
    """Kill one leftover rank and what it started; False if it was gone already."""
    if not mark.is_alive():
        return False
    target = os.killpg if os.getpgid(mark.pid) == mark.pid else os.kill
    target(mark.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while mark.is_alive():
        if time.monotonic() > deadline:
            raise DeviceError(
                f"process {mark.pid} of an earlier agent cannot be killed; its device may need a reset"
            )
        time.sleep(0.01)
    return True
