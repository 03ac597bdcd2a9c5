"""Sync submits: the clip as the answer, and a clear word when it does not come."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from api.routes import sync
from tests.service.api.conftest import CLIP, SUBMIT, Farm, Served

PATH = "/v1/videos/sync"
pytestmark = pytest.mark.usefixtures("quick_look")


@pytest.fixture
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "WATCH_INTERVAL_S", 0.02)


@pytest.fixture
async def worker(farm: Farm) -> AsyncIterator[None]:
    """Finish whatever is queued, as a worker would."""

    async def work() -> None:
        while True:
            if await asyncio.to_thread(farm.execute, "SELECT 1 FROM job WHERE state = 'queued'"):
                await asyncio.to_thread(farm.finish)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(work())
    yield
    task.cancel()


async def first_job(farm: Farm) -> str:
    while True:
        rows = await asyncio.to_thread(farm.execute, "SELECT id FROM job")
        if rows:
            return str(rows[0][0])
        await asyncio.sleep(0.02)


@pytest.mark.usefixtures("worker")
async def test_clip_is_the_answer(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, data=SUBMIT, files={"extra_params": (None, '{"resolution": "272p"}')})
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, CLIP, "video/mp4")
    assert answer.headers["x-model"] == "magi-2-preview"
    assert answer.headers["x-stage-durations"] == '{"denoise": 1.5}'
    assert answer.headers["x-peak-memory-mb"] == "12.5"
    assert float(answer.headers["x-inference-time-s"]) >= 0
    video = (await client.get(f"/v1/videos/{answer.headers['x-job-id']}")).json()
    assert video["status"] == "completed"


@pytest.mark.req("F-11")
@pytest.mark.usefixtures("worker")
async def test_repeated_key_attaches_to_the_same_job(client: httpx.AsyncClient, farm: Farm) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(*(client.post(PATH, json=SUBMIT, headers=headers) for _ in range(3)))
    assert {answer.content for answer in answers} == {CLIP}
    assert farm.num_jobs() == 1


async def test_time_that_is_over_leaves_the_job_alone(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{PATH}?timeout=1", json=SUBMIT)
    body = answer.json()
    assert (answer.status_code, body["code"]) == (504, "sync_timeout")
    assert answer.headers["location"] == f"/v1/videos/{body['video_id']}"
    assert (await client.get(answer.headers["location"])).json()["state"] == "queued"


async def test_job_that_ends_otherwise_is_an_error_with_its_id(client: httpx.AsyncClient, farm: Farm) -> None:
    waiting = asyncio.create_task(client.post(PATH, json=SUBMIT))
    job_id = await first_job(farm)
    await client.post(f"/v1/videos/{job_id}/cancel")
    answer = await waiting
    assert (answer.status_code, answer.json()["code"]) == (409, "canceled")
    assert answer.json()["video_id"] == job_id


async def test_refused_request_is_refused_as_anywhere(client: httpx.AsyncClient, farm: Farm) -> None:
    answer = await client.post(PATH, json={**SUBMIT, "seconds": 4})
    assert (answer.status_code, answer.json()["code"], farm.num_jobs()) == (422, "unsupported_duration", 0)


async def test_one_waiter_too_many_is_sent_away(
    client: httpx.AsyncClient, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "MAX_WAITERS", 0)
    answer = await client.post(PATH, json=SUBMIT)
    assert (answer.status_code, answer.json()["code"], farm.num_jobs()) == (503, "no_capacity", 0)
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("query", "state"), [("", "canceled"), ("?on_disconnect=keep", "queued")])
async def test_client_that_leaves_cancels_its_job_unless_it_wants_it_kept(
    farm: Farm, serve: Callable[[], Served], query: str, state: str
) -> None:
    url = serve().url
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {farm.key}"}) as client:
        waiting = asyncio.create_task(client.post(f"{url}{PATH}{query}", json=SUBMIT, timeout=60))
        job_id = await first_job(farm)
        waiting.cancel()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {farm.key}"}) as other:
        wait = "?wait=5" if state == "canceled" else ""
        ended = await other.get(f"{url}/v1/videos/{job_id}{wait}")
    assert ended.json()["state"] == state
