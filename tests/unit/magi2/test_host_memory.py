"""Host memory of a process tree: descendants count, processes that end meanwhile do not disturb."""

import os
import subprocess
import sys
import time

from magi2.host_memory import PeakPss, tree_pss

HELD = 64 << 20
CHILD = f"held = bytearray(b'x' * {HELD}); print('ready', flush=True); input()"


def test_memory_of_a_child_counts() -> None:
    before = tree_pss(os.getpid())
    with (
        subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
        PeakPss(os.getpid(), period_s=0.01) as memory,
    ):
        child.stdout.readline()
        assert tree_pss(os.getpid()) >= before + HELD // 2
        seen = memory.num_samples
        while memory.num_samples < seen + 2:
            time.sleep(0.01)
        child.communicate(b"\n")
    assert memory.peak_bytes >= before + HELD // 2
    assert tree_pss(os.getpid()) < memory.peak_bytes


def test_process_that_is_gone_has_no_figure() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert tree_pss(child.pid) is None
