"""Masters that processes of one machine share: one file per block in a memory file system.

Promises: a block is seen by others only when it is whole; the first process writes, later ones wait and then
map the same pages; the files go when the last user closes, and what a killed process left is used again or
cleared away by the next start. Only processes of the same user share. It looks into no weight.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

_USERS, _WRITER = "users", "writer"
_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder inside it is this user's alone


class SharedMemory:
    """Blocks in the files of one key.

    Args:
        folder: Of all keys; made for this user alone.
        key: Equal for processes whose masters are equal.

    Raises:
        OSError: The folder cannot be used, or the file system is full.
    """

    def __init__(self, folder: Path, key: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{folder} belongs to another user; shared weights need a folder of one's own"
            )
        _clear_unused(folder, keep=key)
        self._path = folder / key
        self._users = _join(self._path)
        self._writer = os.open(self._path / _WRITER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._writer, fcntl.LOCK_EX)  # until all blocks are written
        self._blocks: dict[int, Tensor] = {}

    def block(self, block: int, nbytes: int) -> Tensor:
        """Map a block's file, made of full size if it is new."""
        if block not in self._blocks:
            path = self._file(block)
            path = path if path.exists() else path.with_suffix(".part")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Reserved now: a full file system is an error here, and a killed process later.
                os.posix_fallocate(descriptor, 0, max(1, nbytes))
                memory = mmap.mmap(descriptor, max(1, nbytes))
            finally:
                os.close(descriptor)
            self._blocks[block] = torch.frombuffer(memory, dtype=torch.uint8)
        return self._blocks[block]

    def digest_of(self, block: int) -> int | None:
        """Return what the writer of a whole block said of it."""
        path = self._file(block)
        return int(path.with_suffix(".digest").read_text()) if path.exists() else None

    def fill_done(self, block: int, digest: int) -> None:
        """Show a whole block to others."""
        path = self._file(block)
        if not path.exists():
            path.with_suffix(".digest").write_text(str(digest))
            path.with_suffix(".part").rename(path)

    def all_done(self) -> None:
        """Let the next process go on; all blocks are written."""
        os.close(self._writer)
        self._writer = -1

    def close(self) -> None:
        """Unmap, and delete the files if nobody else uses them."""
        self._blocks.clear()
        if self._writer >= 0:
            self.all_done()
        if self._users >= 0:
            _leave(self._path, self._users)
            self._users = -1

    def _file(self, block: int) -> Path:
        return self._path / f"block-{block:03}.flat"


def shared_folder(device: torch.device) -> Path | None:
    """Return where processes of this user share masters: memory, and only where page-locking pays."""
    return _MEMORY / f"magi2-{os.getuid()}" if device.type == "cuda" and _MEMORY.is_dir() else None


def _join(path: Path) -> int:
    """Take a shared lock in a key's folder, which the last user may be deleting at this moment."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            if (path / _USERS).stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _leave(path: Path, descriptor: int) -> None:
    """Give the shared lock up; whoever can take it alone was the last."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _clear_unused(folder: Path, *, keep: str) -> None:
    """Delete what killed processes left under other keys."""
    for path in folder.iterdir():
        if path.name == keep or not (path / _USERS).exists():
            continue
        _leave(path, os.open(path / _USERS, os.O_RDWR | os.O_CLOEXEC))
