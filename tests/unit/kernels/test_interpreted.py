"""Every Triton kernel runs in Triton's interpreter on the CPU and equals its definition at small odd sizes.

The interpreter is chosen when a kernel module is imported, so the cases run in processes of their own.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent / "interpreted"
# Triton has wheels for Linux alone; the `dev` extra brings it where CI and developers run.
HAS_WHEEL = (platform.system(), platform.machine()) == ("Linux", "x86_64")


@pytest.mark.timeout(900)  # a minute of work on a busy machine; every case has the usual limit of its own
@pytest.mark.parametrize("cases", ["tokenwise.py", "mixture.py", "scripts.py"] if HAS_WHEEL else [])
def test_kernels_equal_their_definitions(cases: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER / cases)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
