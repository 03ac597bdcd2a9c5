"""The real engine on a worker's ranks: a clip, a stop at a step, a killed rank and the way back."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magi2.contract import GenerationRequest
from magi2.media.probe import breaches, probe
from tests.short_checkpoint import write_short_checkpoint
from worker.board import WorkReport
from worker.engine_api import Outcome, RenderRequest, RenderResult, Stopped
from worker.group import GpuGroup, GroupCrashError, GroupSpec, Stop

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuGroup]:
    folder = tmp_path_factory.mktemp("group")
    write_short_checkpoint(folder / "tiny")
    spec = GroupSpec(
        profile="sp2-cpu",
        engine="magi2",
        devices=(),
        world=2,
        ckpt_root=str(folder / "tiny"),
        deterministic=False,
        environment={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        log_dir=folder / "logs",
        layout={"ulysses": 2, "vae_patch_parallel": 2},
    )
    made = GpuGroup(spec)
    yield made
    made.kill()


class Watcher:
    """Sees the reports of a run, and acts once when a step is reached."""

    def __init__(self, at_step: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.reports: list[WorkReport] = []
        self.order = Stop.GO_ON
        self._at_step, self._act = at_step, act

    def __call__(self, report: WorkReport) -> None:
        self.reports.append(report)
        if report.phase == "denoise" and report.step == self._at_step:
            self._at_step = -1
            self._act()

    def stop(self) -> None:
        self.order = Stop.AT_STEP


def render(group: GpuGroup, path: Path, steps: int, watcher: Watcher) -> Outcome:
    request = GenerationRequest("a red kite over the sea", "272p", steps, seed=7)
    token = path.stem
    wanted = RenderRequest(token, request.to_json(), None, str(path))
    return group.run([wanted], token, on_progress=watcher, stop=lambda: watcher.order)[token]


def test_group_renders_stops_at_a_step_and_survives_a_killed_rank(group: GpuGroup, tmp_path: Path) -> None:
    assert group.start()
    assert group.fingerprint["layout"] == "--ulysses 2 --vae-patch-parallel 2"
    first_pids = group.pids

    watcher = Watcher(at_step=1)
    watcher._act = watcher.stop
    outcome = render(group, tmp_path / "stopped.mp4", 50, watcher)
    assert isinstance(outcome, Stopped)
    assert "stopped after step" in str(outcome)
    assert max(report.step for report in watcher.reports) < 50

    watcher = Watcher()
    outcome = render(group, tmp_path / "clip.mp4", 1, watcher)
    assert isinstance(outcome, RenderResult), outcome
    assert breaches(probe(tmp_path / "clip.mp4"), 448, 256) == []
    assert outcome.stats["conditioning"]["branches"]["conditional"]["video"] == 14_336
    assert group.pids == first_pids

    killed_at = []

    def kill_second_rank() -> None:
        killed_at.append(time.monotonic())
        os.kill(first_pids[1], signal.SIGKILL)

    with pytest.raises(GroupCrashError, match=r"rank [01]: ") as crash:
        render(group, tmp_path / "lost.mp4", 50, Watcher(at_step=1, act=kill_second_rank))
    assert time.monotonic() - killed_at[0] < 240  # by its death, long before any time-out
    assert set(json.loads(json.dumps(crash.value.evidence))["log"]) == {"0", "1"}
    assert group.start()
    assert set(group.pids).isdisjoint(first_pids)
    assert group.answers()
