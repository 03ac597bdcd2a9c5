"""A sequence-parallel job through the whole farm: four CPU ranks, a cancel, and a rank killed in mid-job.

Its clip equals that of another job bit for bit, and nearly that of one rank: all in fp32. The stream is of
high quality, since the encoder enlarges differences of one in few values: frames at 91 dB before it are at
47 dB behind it with the usual quality, and at 53 dB with this one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import sqlalchemy

from farm.accounts import create_key, ensure_account
from farm.db.session import unit_of_work
from farm.settings import Settings
from magi2.config import EngineConfig
from magi2.contract import default_limits, validate
from magi2.media.mp4 import write_mp4
from magi2.media.probe import breaches, probe
from magi2.pipeline import Magi2Pipeline
from tests import tolerances
from tests.service.farm_processes import FarmProcesses

PROFILES = """
deterministic: false
auto: [sp4-cpu]
profiles:
  sp4-cpu:
    devices: 0
    ulysses: 4
    vae_patch_parallel: 4
    dtype: float32
    crf: 4
    default_tier: 272p
    max_tier: 272p
    default_steps: 2
    max_steps: 20
    execution_timeout_s: 900
"""


# Four ranks start torch and render on whatever cores there are.
PATIENCE_S = 900
FIELDS = {"prompt": "A red kite climbs over dunes.", "num_inference_steps": 1, "seed": 5}


@pytest.fixture
def farm(
    database: sqlalchemy.Engine,
    settings: Settings,
    farm_environment: dict[str, str],
    short_checkpoint: Path,
    tmp_path: Path,
) -> Iterator[FarmProcesses]:
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(PROFILES)
    environment = {
        **farm_environment,
        "FARM_PROFILES_FILE": str(profiles),
        "MAGI2_CKPT_ROOT": str(short_checkpoint),
        "OMP_NUM_THREADS": "1",
        # A rank shall be killed in the middle of a short render, so its phase must be known soon.
        "FARM_WORKER__LEASE_S": "20",
        "FARM_WORKER__HEARTBEAT_S": "0.5",
    }
    with unit_of_work(database) as conn:
        key = create_key(conn, ensure_account(conn, "tests"), settings.key_pepper).text
    processes = FarmProcesses(environment, key, tmp_path / "logs", profile="sp4-cpu")
    try:
        processes.start("api", "ticker", "worker")
        yield processes
    finally:
        processes.stop()


@pytest.mark.timeout(3600)
def test_job_of_four_ranks_reports_cancels_survives_a_killed_rank_and_equals_one_rank(
    farm: FarmProcesses, short_checkpoint: Path, tmp_path: Path
) -> None:
    long = farm.submit({"prompt": "A lantern swings in the wind.", "num_inference_steps": 20})["id"]
    farm.wait_for_denoising(long, attempt=1)
    assert farm.http.post(f"/v1/videos/{long}/cancel").status_code == 200
    farm.wait_for(long, lambda video: video["state"] == "canceled", "canceled", PATIENCE_S)

    job = farm.submit(FIELDS)["id"]
    farm.wait_for(job, all_ranks_are_at_work, "work of all ranks", PATIENCE_S)
    farm.kill_engine()
    video = farm.wait_for(job, is_completed, "completed", PATIENCE_S)
    assert video["attempt"] == 2
    assert breaches(probe(farm.download(job, tmp_path / "clip.mp4")), 448, 256) == []
    frames = frames_of(tmp_path / "clip.mp4")

    again = farm.submit(FIELDS)["id"]
    assert farm.wait_for(again, is_completed, "completed", PATIENCE_S)["attempt"] == 1
    assert np.array_equal(frames_of(farm.download(again, tmp_path / "again.mp4")), frames)

    error = np.square(frames.astype(float) - frames_of(render_alone(short_checkpoint, tmp_path))).mean()
    assert 10 * np.log10(255**2 / max(error, 1e-12)) >= tolerances.RENDER_PSNR_DB


def all_ranks_are_at_work(video: dict[str, Any]) -> bool:
    return video["attempt"] == 1 and video["phase"] in {"denoise", "decode_video"}


def is_completed(video: dict[str, Any]) -> bool:
    return video["status"] == "completed"


def frames_of(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def render_alone(checkpoint: Path, folder: Path) -> Path:
    """Render the same request on one rank, in this process."""
    request = validate(FIELDS | {"resolution": "272p"}, limits=default_limits()).request
    pipeline = Magi2Pipeline(EngineConfig(checkpoint, dtype="float32", crf=4))
    try:
        clip = pipeline(request).clip
    finally:
        pipeline.close()
    path = folder / "alone.mp4"
    write_mp4(path, clip, crf=pipeline.config.crf)
    return path
