"""What docs/engine.md says anybody can run is run as it stands, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magi2.contract import TIERS, Tier

ROOT = Path(__file__).parents[4]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


@pytest.mark.timeout(1200)  # a whole 272p render, also on a busy machine
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


def test_documented_library_example_makes_a_clip(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 64, 64, 2))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny_root)
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/engine.md").read_text("utf-8"), re.DOTALL)
    exec(compile(example, "docs/engine.md", "exec"), {"__name__": "example"})
    assert (tmp_path / "clip.mp4").stat().st_size > 1_000
