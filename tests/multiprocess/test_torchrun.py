"""The command under `torchrun`, as a user starts it: two ranks, one clip, one voice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magi2.media.probe import breaches, probe
from tests.short_checkpoint import write_short_checkpoint
from worker.devices import free_port

ROOT = Path(__file__).parents[2]
FLAGS = "--ulysses 2 --vae-patch-parallel 2 --device cpu --resolution 272p --num-inference-steps 1 --measure"


@pytest.mark.timeout(1200)
def test_two_ranks_under_torchrun_make_one_clip_and_speak_once(tmp_path: Path) -> None:
    write_short_checkpoint(tmp_path / "tiny")
    clip = tmp_path / "clip.mp4"
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    request = [*FLAGS.split(), "--prompt", "Rain on a tin roof.", "--output", str(clip)]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            *launcher,
            "-m",
            "magi2",
            "generate",
            "--checkpoint",
            tmp_path / "tiny",
            *request,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert breaches(probe(clip), 448, 256) == []
    # Each rank would draw a seed of its own; one holds for both.
    [seed] = re.findall(r"seed (\d+) was drawn", ended.stderr)
    assert f"seed {seed}, 1 step at 272p" in ended.stdout
    assert ended.stdout.count("clip.mp4: 448x256") == 1
    assert ended.stderr.count("--ulysses 2 --vae-patch-parallel 2 is unqualified") == 1
    # Both ranks and their launcher: each holds torch.
    [mebibytes] = re.findall(r"peak host memory of all processes (\d+) MiB", ended.stdout)
    assert int(mebibytes) > 400
