"""Measure what one command needs: wall time and the highest sum of PSS over its process tree.

`python benchmarks/demo_memory.py [--limit-gib 4] [-- COMMAND ...]` runs COMMAND (default: `./magi2-farm
demo`), samples the tree four times a second and prints one JSON line; exit 1 where the command failed or the
peak exceeds the limit. A process of another user, whose PSS the kernel does not tell in some containers,
counts with its RSS, so the sum errs upwards. Linux only. `make bench` does not run it: a render takes too
long.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.25
GIB = 1024**3
PAGE_BYTES = 4096
NUM_SHOWN = 6


def tree_of(root_pid: int) -> set[int]:
    """Return a process and all that descend from it."""
    children = defaultdict(set)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children[parent].add(int(entry.name))
    found, border = {root_pid}, {root_pid}
    while border:
        border = {child for pid in border for child in children[pid]} - found
        found |= border
    return found


def memory_of(pid: int) -> int:
    """Return the PSS of a process in bytes, its RSS where that is hidden, 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except PermissionError:
        pass
    except (FileNotFoundError, ProcessLookupError):
        return 0
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0


def name_of(pid: int) -> str:
    """Return a short name of a process: its program, or the Python module that it runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    if "-m" in words:
        return words[words.index("-m") + 1]
    return Path(words[0].split(" ")[0].rstrip(":")).name or "gone"


def measure(command: list[str]) -> dict:
    """Run a command and return its exit code, wall time and peak."""
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    peak, at_s, parts = 0, 0.0, {}
    while process.poll() is None:
        usage = {pid: memory_of(pid) for pid in tree_of(process.pid)}
        total = sum(usage.values())
        if total > peak:
            peak, at_s = total, time.monotonic() - started
            parts = defaultdict(int)
            for pid, size in usage.items():
                parts[name_of(pid)] += size
        time.sleep(SAMPLE_S)
    largest = sorted(parts.items(), key=lambda item: -item[1])[:NUM_SHOWN]
    return {
        "exit_code": process.returncode,
        "wall_s": round(time.monotonic() - started, 1),
        "peak_gib": round(peak / GIB, 3),
        "peak_at_s": round(at_s, 1),
        "at_peak_mib": {name: round(size / 1024**2) for name, size in largest},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-gib", type=float, default=4.0)
    parser.add_argument("command", nargs="*", default=["./magi2-farm", "demo"])
    arguments = parser.parse_args()
    measured = measure(arguments.command)
    print(json.dumps(measured))
    return 0 if measured["exit_code"] == 0 and measured["peak_gib"] < arguments.limit_gib else 1


if __name__ == "__main__":
    sys.exit(main())
