"""Where the servers of tests keep their data: in memory, where there is room.

Every test makes and drops a database of 300 files. On a disk that is most of what such a test costs, and most
of what it waits for; nothing of it needs to last.
"""

import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
# One set of servers takes about 100 MB; containers often have 64 MB in all.
ROOM_BYTES = 2 << 30


def make_server_folder() -> Path:
    """Make a folder that everybody may enter: where tests run as root, PostgreSQL runs as nobody."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
    folder = Path(tempfile.mkdtemp(prefix="magi2-farm-tests-", dir=MEMORY if has_room else None))
    folder.chmod(0o755)
    return folder
