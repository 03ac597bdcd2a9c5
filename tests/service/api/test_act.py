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


async def end(client: httpx.AsyncClient, video_id: str) -> None:
    assert (await client.post(f"/v1/videos/{video_id}/cancel")).status_code == 200


async def test_retry_queues_the_same_video_with_what_may_differ(client: httpx.AsyncClient) -> None:
    video_id = await submit(client)
    before = (await client.get(f"/v1/videos/{video_id}")).json()
    await end(client, video_id)
    plain = (await client.post(f"/v1/videos/{video_id}/retry")).json()
    await end(client, video_id)
    wanted = {"priority": "high", "new_seed": 77, "profile": "auto"}
    other = (await client.post(f"/v1/videos/{video_id}/retry", json=wanted)).json()
    await end(client, video_id)
    drawn = (await client.post(f"/v1/videos/{video_id}/retry", json={"new_seed": True})).json()
    assert (plain["id"], plain["state"], plain["seed"], plain["retry_count"]) == (
        video_id,
        "queued",
        before["seed"],
        1,
    )
    assert (other["seed"], other["priority"], other["profile"]) == (77, 5, "tiny-cpu")
    assert drawn["seed"] not in {77, before["seed"]}


async def test_retry_of_what_is_active_done_or_unknown_is_refused(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    video_id = await submit(client)
    waiting = await client.post(f"/v1/videos/{video_id}/retry")
    farm.finish()
    done = await client.post(f"/v1/videos/{video_id}/retry")
    unknown = await client.post("/v1/videos/video_1/retry")
    for answer in (waiting, done):
        assert (answer.status_code, answer.json()["code"]) == (409, "not_retryable")
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"profile": "nothing"}, "profile"),
        ({"priority": "urgent"}, "priority"),
        ({"new_seed": -1}, "new_seed"),
        ({"seed": 1}, "seed"),
    ],
)
async def test_retry_refuses_what_it_does_not_know(client: httpx.AsyncClient, body: dict, loc: str) -> None:
    video_id = await submit(client)
    await end(client, video_id)
    answer = await client.post(f"/v1/videos/{video_id}/retry", json=body)
    assert answer.status_code == 422
    assert loc in {error["loc"] for error in answer.json()["errors"]}


async def test_retry_names_all_problems_at_once(client: httpx.AsyncClient) -> None:
    video_id = await submit(client)
    await end(client, video_id)
    body = {"foo": 1, "new_seed": "x", "priority": 99, "profile": "warp"}
    answer = await client.post(f"/v1/videos/{video_id}/retry", json=body)
    said = {error["loc"]: error["msg"] for error in answer.json()["errors"]}
    assert (answer.status_code, list(said)) == (422, ["foo", "priority", "profile", "new_seed"])
    assert said["foo"] == "foo is not supported; there are profile, priority, new_seed"
    assert "(got warp)" in said["profile"]
    assert said["new_seed"].endswith("(got x)")


async def test_change_names_all_problems_at_once(client: httpx.AsyncClient) -> None:
    video_id = await submit(client)
    body = {"foo": 1, "priority": 99, "metadata": {"a": "\0"}}
    answer = await client.patch(f"/v1/videos/{video_id}", json=body)
    assert [error["loc"] for error in answer.json()["errors"]] == ["foo", "priority", "metadata.a"]


async def test_id_that_names_nothing_is_said(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/videos/nonsense")
    assert (answer.status_code, answer.json()["detail"]) == (404, "this video (nonsense) was not found")


async def test_waiting_video_can_be_changed(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    ((deadline,),) = farm.execute("SELECT queue_deadline FROM job")
    body = {"priority": "low", "metadata": {"a": "b"}, "expires_in": 3600}
    answer = await client.patch(f"/v1/videos/{video_id}", json=body)
    shown = (await client.get(f"/v1/videos/{video_id}")).json()
    assert answer.status_code == 200
    assert (shown["priority"], shown["metadata"], shown["expires_in"]) == (-5, {"a": "b"}, 3600)
    [(rank_s, earlier_s)] = farm.execute(
        "SELECT extract(epoch FROM rank_at - queued_at)::int, extract(epoch FROM :at - queue_deadline)::int"
        " FROM job",
        at=deadline,
    )
    assert (rank_s, earlier_s) == (3000, 86_400 - 3600)


async def test_only_a_waiting_video_can_be_changed(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    farm.start()
    running = await client.patch(f"/v1/videos/{video_id}", json={"priority": 0})
    canceled = await submit(client)
    await end(client, canceled)
    ended = await client.patch(f"/v1/videos/{canceled}", json={"priority": 0})
    unknown_member = await client.patch(f"/v1/videos/{video_id}", json={"prompt": "x"})
    assert (running.status_code, running.json()["code"]) == (409, "already_started")
    assert (ended.status_code, ended.json()["code"]) == (409, "already_finished")
    assert unknown_member.status_code == 422


async def test_priority_above_normal_needs_its_scope_everywhere(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    video_id = await submit(client)
    weak = {"Authorization": f"Bearer {farm.new_key(scopes=('videos:read', 'videos:write'))}"}
    change = await client.patch(f"/v1/videos/{video_id}", json={"priority": 1}, headers=weak)
    await end(client, video_id)
    again = await client.post(f"/v1/videos/{video_id}/retry", json={"priority": 1}, headers=weak)
    assert {answer.json()["code"] for answer in (change, again)} == {"insufficient_scope"}


@pytest.mark.parametrize("path", ["video_1/remix", "video_1/edits", "edits", "extensions", "characters"])
async def test_shapes_that_are_not_served_say_so(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(f"/v1/videos/{path}", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented")
    assert "POST /v1/videos" in answer.json()["detail"]


async def test_two_accounts_cannot_act_on_each_others_videos(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    answers = [
        await client.post(f"/v1/videos/{video_id}/cancel", headers=stranger),
        await client.post(f"/v1/videos/{video_id}/retry", headers=stranger),
        await client.patch(f"/v1/videos/{video_id}", json={"priority": 0}, headers=stranger),
        await client.delete(f"/v1/videos/{video_id}", headers=stranger),
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert (await client.get(f"/v1/videos/{video_id}")).json()["state"] == "queued"
