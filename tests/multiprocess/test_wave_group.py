"""The real engine on two replicas of a worker's group: a wave of two files, and a rank killed in one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from magi2.contract import GenerationRequest
from magi2.media.probe import breaches, probe
from tests.short_checkpoint import write_short_checkpoint
from worker.board import WorkReport
from worker.engine_api import RenderRequest, RenderResult
from worker.group import GpuGroup, GroupCrashError, GroupSpec, Stop

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[GpuGroup]:
    write_short_checkpoint(tmp_path / "tiny")
    spec = GroupSpec(
        profile="dp2-cpu",
        engine="magi2",
        devices=(),
        world=2,
        ckpt_root=str(tmp_path / "tiny"),
        deterministic=False,
        environment={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        log_dir=tmp_path / "logs",
        layout={"data_parallel": 2, "dlo": True},
    )
    made = GpuGroup(spec)
    yield made
    made.kill()


def wave(folder: Path, steps: int) -> list[RenderRequest]:
    prompts = ("a red kite over the sea", "rain on a tin roof")
    return [
        RenderRequest(
            f"job-{slot}",
            GenerationRequest(prompt, "272p", steps, seed=7).to_json(),
            None,
            str(folder / f"{slot}-{steps}.mp4"),
            slot,
        )
        for slot, prompt in enumerate(prompts)
    ]


def test_wave_writes_two_files_and_a_killed_rank_ends_it(group: GpuGroup, tmp_path: Path) -> None:
    assert group.start()
    assert group.fingerprint["layout"] == "--data-parallel 2 --dlo"
    seen: list[WorkReport] = []
    requests = wave(tmp_path, 1)
    outcomes = group.run(requests, "first", on_progress=seen.append, stop=lambda: Stop.GO_ON)
    for request in requests:
        assert isinstance(outcomes[request.request_id], RenderResult), outcomes
        assert breaches(probe(Path(request.output_path)), 448, 256) == []
    first, second = (Path(request.output_path).read_bytes() for request in requests)
    assert first != second

    def kill_second(report: WorkReport) -> None:
        if report.phase == "denoise":
            os.kill(group.pids[1], signal.SIGKILL)

    with pytest.raises(GroupCrashError):
        group.run(wave(tmp_path, 50), "lost", on_progress=kill_second, stop=lambda: Stop.GO_ON)
    assert not (tmp_path / "0-50.mp4").exists()
