"""A sequence-parallel job through the whole farm: four CPU ranks, a cancel, and a rank killed in mid-job."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy

from farm.accounts import create_key, ensure_account
from farm.db.session import unit_of_work
from farm.settings import Settings
from magi2.media.probe import breaches, probe
from tests.service.farm_processes import FarmProcesses

PROFILES = """
deterministic: false
auto: [sp4-cpu]
profiles:
  sp4-cpu:
    devices: 0
    ulysses: 4
    vae_patch_parallel: 4
    default_tier: 272p
    max_tier: 272p
    default_steps: 2
    max_steps: 20
    execution_timeout_s: 900
"""


@pytest.fixture
def farm(
    database: sqlalchemy.Engine,
    settings: Settings,
    farm_environment: dict[str, str],
    tiny_checkpoint: Path,
    tmp_path: Path,
) -> Iterator[FarmProcesses]:
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(PROFILES)
    environment = {
        **farm_environment,
        "FARM_PROFILES_FILE": str(profiles),
        "MAGI2_CKPT_ROOT": str(tiny_checkpoint),
        "OMP_NUM_THREADS": "1",
    }
    with unit_of_work(database) as conn:
        key = create_key(conn, ensure_account(conn, "tests"), settings.key_pepper).text
    processes = FarmProcesses(environment, key, tmp_path / "logs", profile="sp4-cpu")
    try:
        processes.start("api", "ticker", "worker")
        yield processes
    finally:
        processes.stop()


@pytest.mark.timeout(600)
def test_job_of_four_ranks_reports_cancels_and_survives_a_killed_rank(
    farm: FarmProcesses, tmp_path: Path
) -> None:
    long = farm.submit({"prompt": "A lantern swings in the wind.", "num_inference_steps": 20})["id"]
    farm.wait_for_denoising(long, attempt=1)
    assert farm.http.post(f"/v1/videos/{long}/cancel").status_code == 200
    farm.wait_for(long, lambda video: video["state"] == "canceled", "canceled")

    job = farm.submit({"prompt": "A red kite climbs over dunes.", "num_inference_steps": 2, "seed": 5})["id"]
    farm.wait_for_denoising(job, attempt=1)
    farm.kill_engine()
    video = farm.wait_for(job, lambda video: video["status"] == "completed", "completed")
    assert video["attempt"] == 2
    assert breaches(probe(farm.download(job, tmp_path / "clip.mp4")), 448, 256) == []
