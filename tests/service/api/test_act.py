"""Cancel and delete."""

import httpx
import pytest

from farm.db.session import unit_of_work
from farm.jobs.lifecycle import finish_cancel
from tests.service.api.conftest import SUBMIT, Farm


async def submit(client: httpx.AsyncClient) -> str:
    return str((await client.post("/v1/videos", json=SUBMIT)).json()["id"])


async def test_queued_video_is_canceled_at_once(client: httpx.AsyncClient) -> None:
    video_id = await submit(client)
    answer = await client.post(f"/v1/videos/{video_id}/cancel")
    video = answer.json()
    assert answer.status_code == 200
    assert (video["state"], video["status"], video["error"]["code"]) == ("canceled", "failed", "canceled")
    assert video["urls"]["cancel"] is None


@pytest.mark.req("F-05")
async def test_running_video_is_asked_to_stop_and_asking_again_changes_nothing(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    video_id = await submit(client)
    claimed = farm.start()
    first = await client.post(f"/v1/videos/{video_id}/cancel")
    second = await client.post(f"/v1/videos/{video_id}/cancel")
    assert first.json()["state"] == second.json()["state"] == "running"
    assert first.json()["cancel_requested_at"] == second.json()["cancel_requested_at"] is not None
    assert first.headers["etag"] == second.headers["etag"]
    with unit_of_work(farm.database) as conn:
        assert finish_cancel(conn, video_id, claimed.epoch)
    assert (await client.get(f"/v1/videos/{video_id}")).json()["state"] == "canceled"


@pytest.mark.req("F-05")
async def test_finished_video_cannot_be_canceled(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    farm.finish()
    answer = await client.post(f"/v1/videos/{video_id}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "already_finished")
    assert answer.json()["error"]["type"] == "conflict_error"


@pytest.mark.req("F-06")
async def test_deleted_video_is_gone_for_every_call(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    farm.start()
    answer = await client.delete(f"/v1/videos/{video_id}")
    assert answer.json() == {"id": video_id, "object": "video.deleted", "deleted": True}
    assert (await client.get("/v1/videos")).json()["data"] == []
    for call in (
        client.get(f"/v1/videos/{video_id}"),
        client.get(f"/v1/videos/{video_id}/content"),
        client.post(f"/v1/videos/{video_id}/cancel"),
        client.delete(f"/v1/videos/{video_id}"),
    ):
        assert (await call).status_code == 404
    assert farm.execute("SELECT cancel_requested_at IS NOT NULL FROM job")[0][0]
