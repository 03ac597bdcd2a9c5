"""Where the servers of tests keep their data: in memory, where there is room.

Every test makes and drops a database of 300 files. On a disk that is most of what such a test costs, and most
of what it waits for; nothing of it needs to last. What a killed run has left is removed by the next one.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "magi2-farm-tests-"
# One set of servers takes about 100 MB; containers often have 64 MB in all.
ROOM_BYTES = 2 << 30
# A folder that is younger may belong to a process that has not locked it yet.
LEFT_S = 60.0


def make_server_folder() -> Path:
    """Make a folder that everybody may enter: where tests run as root, PostgreSQL runs as nobody.

    It is locked until this process ends.
    """
    if MEMORY.is_dir():
        remove_left(MEMORY)
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY if has_room else None))
    folder.chmod(0o755)
    assert _lock(folder) is not None
    return folder


def remove_left(place: Path) -> None:
    """Remove the folders of processes that are over."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            is_old = time.time() - folder.stat().st_mtime > LEFT_S
            lock = _lock(folder) if is_old else None
        except OSError:  # removed meanwhile, or another user's
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
