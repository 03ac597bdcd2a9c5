"""The backup and the restore of docs/operations.md, as printed there, bring every finished video back."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import sqlalchemy

from farm.accounts import create_key, ensure_account
from farm.db.session import unit_of_work
from farm.embedded.binaries import POSTGRES, find_program
from farm.settings import Settings
from farm.storage import ObjectStore
from tests.compose_file import ROOT
from tests.service.api.conftest import OBJECTS, SUBMIT, Farm

KINDS = {"video": "video", "sprite": "spritesheet", "audio": "audio", "meta": "metadata"}


def printed(kind: str) -> str:
    """Return the commands of a block of the page."""
    text = (ROOT / "docs/operations.md").read_text()
    [block] = re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return block


def run(block: str, environment: dict[str, str], cwd: Path) -> None:
    programs = [Path(sys.executable).parent, find_program(POSTGRES, os.environ).parent]
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=cwd, env={**environment, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


async def contents(client: httpx.AsyncClient, job_id: str) -> dict[str, bytes]:
    found = {}
    for kind, variant in KINDS.items():
        answer = await client.get(
            f"/v1/videos/{job_id}/content", params={"variant": variant, "redirect": "false"}
        )
        assert answer.status_code == 200, answer.text
        found[kind] = answer.content
    return found


@pytest.mark.timeout(300)
async def test_every_finished_video_comes_back(
    settings: Settings,
    database: sqlalchemy.Engine,
    object_store: ObjectStore,
    farm_environment: dict[str, str],
    new_database: Callable[[str], str],
    tmp_path: Path,
) -> None:
    with unit_of_work(database) as conn:
        account_id = ensure_account(conn, "acme")
        key = create_key(conn, account_id, settings.key_pepper).text
    farm = Farm(settings, database, object_store, account_id, key)
    async with farm.client() as client:
        answers = [await client.post("/v1/videos", json={**SUBMIT, "profile": "tiny-cpu"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        finished = [farm.finish().job.id for _ in range(2)]
        before = {job_id: (await client.get(f"/v1/videos/{job_id}")).json() for job_id in finished}
    [waiting] = {answer.json()["id"] for answer in answers} - set(finished)
    run(printed("backup"), farm_environment, tmp_path)
    run(printed("backup"), farm_environment, tmp_path)  # the next day

    # Another database and another place in a store: what was there is lost.
    elsewhere = {
        **farm_environment,
        "DATABASE_URL": new_database("template1"),
        "FARM_S3_PREFIX": f"restored-{uuid.uuid4().hex[:8]}",
    }
    run(printed("restore"), elsewhere, tmp_path)

    restored = settings.model_copy(
        update={
            "database_url": elsewhere["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://"),
            "s3_prefix": elsewhere["FARM_S3_PREFIX"],
        }
    )
    async with Farm(restored, database, object_store, account_id, key).client() as client:
        assert (await client.get("/readyz")).json()["status"] == "ready"
        for job_id in finished:
            video = (await client.get(f"/v1/videos/{job_id}")).json()
            assert video == before[job_id]
            assert await contents(client, job_id) == {kind: data for kind, _, _, data in OBJECTS}
        assert (await client.get(f"/v1/videos/{waiting}")).json()["state"] == "queued"
