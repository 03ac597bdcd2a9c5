"""The qualification on four GPUs, tried without one: two gloo ranks for the links, four for a layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.four_gpus.stages import BY_NAME

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


def test_links_and_a_streamed_layout_are_measured_and_merged(tmp_path: Path) -> None:
    program = [sys.executable, "benchmarks/qualify_4gpu.py", "--out", tmp_path, "--tiny", "--budget", "400"]
    for words in (["--world", "2"], ["--only", "layout-dlo-dp2sp2"]):
        done = subprocess.run([*program, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "qualify_4gpu.json").read_text())
    assert sorted(record["stages"]) == ["layout-dlo-dp2sp2", "link-2"]
    for name, entry in record["stages"].items():
        rows = {row["name"]: row for row in entry["rows"]}
        assert all(rows[wanted]["value"] is not None for wanted in BY_NAME[name].wanted(on_cpu=True))
        assert {"at", "command", "commit", "gpus", "layout", "torch", "world"} <= set(entry["stamp"])
    assert [record["stages"][name]["stamp"]["world"] for name in ("link-2", "layout-dlo-dp2sp2")] == [2, 4]
    assert "| layout-dlo-dp2sp2 | values that differ from the resident layers' | 0 | 0 | met |" in done.stdout
