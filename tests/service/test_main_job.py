"""The main job end to end: over HTTP, through every process of the farm, with the real engine at tiny size.

Each test renders: at most three of the five clips that the whole suite may render are made here.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import sqlalchemy
from PIL import Image
from sqlalchemy import select

from farm.accounts import create_key, ensure_account
from farm.db import tables
from farm.db.session import unit_of_work
from farm.settings import Settings
from magi2.media.probe import breaches, probe
from tests.service.conftest import S3Place
from tests.service.farm_processes import FarmProcesses

PROMPT = "A red kite climbs over dunes while the wind hums."


@pytest.fixture
def farm_environment(farm_environment: dict[str, str], short_checkpoint: Path) -> dict[str, str]:
    """Let leases be short, so that a lost worker is noticed soon.

    Not shorter, though: an agent that gets no processor for that long loses a sound render for good.
    """
    return {
        **farm_environment,
        "FARM_WORKER__LEASE_S": "20",
        "FARM_WORKER__HEARTBEAT_S": "1",
        "MAGI2_CKPT_ROOT": str(short_checkpoint),
    }


@pytest.fixture
def farm(
    database: sqlalchemy.Engine, settings: Settings, farm_environment: dict[str, str], tmp_path: Path
) -> Iterator[FarmProcesses]:
    with unit_of_work(database) as conn:
        key = create_key(conn, ensure_account(conn, "tests"), settings.key_pepper).text
    processes = FarmProcesses(farm_environment, key, tmp_path / "logs")
    try:
        processes.start("api", "ticker", "worker")
        yield processes
    finally:
        processes.stop()


def stored_keys(s3: S3Place, ending: str) -> list[str]:
    listed = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=s3.prefix)
    return [entry["Key"] for entry in listed.get("Contents", []) if entry["Key"].endswith(ending)]


@pytest.mark.timeout(2400)
@pytest.mark.req("F-02")
def test_job_survives_engine_worker_and_api_and_ends_with_one_mp4(
    farm: FarmProcesses, database: sqlalchemy.Engine, s3: S3Place, tmp_path: Path
) -> None:
    fields = {"prompt": PROMPT, "num_inference_steps": 2, "output_width": 640, "output_height": 360}
    job_id = farm.submit(fields)["id"]

    farm.wait_for_denoising(job_id, attempt=1)
    farm.kill_engine()
    farm.wait_for_denoising(job_id, attempt=2)
    farm.kill("worker")
    farm.start("worker")
    farm.wait_for_denoising(job_id, attempt=3)
    farm.kill("api")
    farm.start("api")
    video = farm.wait_for(job_id, lambda video: video["status"] == "completed", "completed")

    clip = farm.download(job_id, tmp_path / "clip.mp4")
    assert breaches(probe(clip), 640, 360) == []
    assert video["bytes"] == clip.stat().st_size
    assert video["attempt"] >= 3
    assert len(stored_keys(s3, ".mp4")) == 1
    with database.connect() as conn:
        attempt, event = tables.job_attempt, tables.job_event
        outcomes = conn.execute(select(attempt.c.outcome).where(attempt.c.job_id == job_id)).scalars().all()
        numbers = conn.execute(select(event.c.seq).where(event.c.job_id == job_id)).scalars().all()
    assert outcomes.count("succeeded") == 1
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


@pytest.mark.timeout(2400)
def test_image_job_is_conditioned_as_recorded_and_repeats_exactly(
    farm: FarmProcesses, tmp_path: Path
) -> None:
    fields = {"prompt": PROMPT, "num_inference_steps": "1", "seed": "11"}
    jobs = [
        farm.submit(fields, files={"input_reference": ("view.jpg", jpeg(1000, 700), "image/jpeg")})["id"]
        for _ in range(2)
    ]
    videos = [farm.wait_for(job, lambda video: video["status"] == "completed", "completed") for job in jobs]

    assert [video["conditioning"]["reference_grid"] for video in videos] == [[18, 28]] * 2
    for branch in videos[0]["conditioning"]["branches"].values():
        assert (branch["reference"], branch["special"]) == (504, 1)
    first, second = (farm.download(job, tmp_path / f"{job}.mp4") for job in jobs)
    assert breaches(probe(first), 448, 256) == []
    assert np.array_equal(frames_of(first), frames_of(second))
    assert np.array_equal(samples_of(first), samples_of(second))


def jpeg(width: int, height: int) -> bytes:
    """Return a picture with structure in both directions."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([columns % 256, rows % 256, (rows + columns) // 8 % 256], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def frames_of(clip: Path) -> np.ndarray:
    with av.open(str(clip)) as container:
        return np.stack([frame.to_ndarray() for frame in container.decode(video=0)])


def samples_of(clip: Path) -> np.ndarray:
    with av.open(str(clip)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
