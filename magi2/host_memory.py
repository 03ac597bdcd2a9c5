"""The host memory of a process and all that descend from it, sampled while something runs.

Promises: proportional set size, so that memory which processes share counts once; the peak of the samples,
not of every instant in between. Linux only: elsewhere, and where the kernel tells nothing, there is none.
Sampling costs time, so it runs only when asked for. Torch-free.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

PERIOD_S = 0.5
_KIB = 1024


class PeakPss:
    """Samples the tree below a process for as long as it is entered.

    Args:
        root_pid: The tree's first process.
        period_s: Between samples.
    """

    def __init__(self, root_pid: int, *, period_s: float = PERIOD_S) -> None:
        self.peak_bytes: int | None = None
        self.num_samples = 0
        self._root_pid = root_pid
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, name="pss", daemon=True)

    def __enter__(self) -> PeakPss:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _sample_until_ended(self) -> None:
        while True:
            found = tree_pss(self._root_pid)
            if found is not None:
                self.peak_bytes = max(found, self.peak_bytes or 0)
                self.num_samples += 1
            if self._ended.wait(self._period_s):
                return


def tree_pss(root_pid: int) -> int | None:
    """Return the bytes of a process and its descendants; None if the kernel tells none of them."""
    known = [size for pid in _tree(root_pid) if (size := _pss(pid)) is not None]
    return sum(known) if known else None


def _tree(root_pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; the parent is the second field behind it.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(entry.parent.name))
    found = [root_pid]
    for pid in found:
        found += children.get(pid, [])
    return found


def _pss(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith("Pss:")), None)
