"""The commands that docs/engine.md says anybody can run are run as they stand, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


@pytest.mark.timeout(300)  # a whole 272p render, also on a busy machine
def test_documented_lines_make_and_check_a_clip(tmp_path: Path) -> None:
    (script,) = BLOCK.findall((ROOT / "docs/engine.md").read_text("utf-8"))
    assert [line.split()[3] for line in script.splitlines()] == [
        "tiny-checkpoint",
        "verify-checkpoint",
        "generate",
        "probe",
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "clip.mp4").stat().st_size > 10_000
