"""Batches: all or none, or each on its own; counted, canceled and told of once."""

import asyncio
from typing import Any

import httpx
import pytest

from farm.db.session import unit_of_work
from farm.groups import Group, heartbeat, register
from tests.service.api.conftest import PROFILE, SUBMIT, Farm

PATH = "/v1/videos/batches"


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(PATH, json={"defaults": SUBMIT, **body})


async def test_defaults_and_seeds_make_one_video_each(client: httpx.AsyncClient, farm: Farm) -> None:
    items = [{"seeds": [1, 2, 3]}, {"prompt": "a tea seller", "seed": 9, "metadata": {"a": "b"}}]
    answer = await post(client, items=items, metadata={"project": "x"})
    batch = answer.json()
    assert answer.status_code == 200
    assert answer.headers["location"] == f"{PATH}/{batch['id']}"
    assert [(item["index"], item["seed"]) for item in batch["items"]] == [(0, 1), (0, 2), (0, 3), (1, 9)]
    assert batch["counts"] == {"queued": 4, "in_progress": 0, "completed": 0, "failed": 0, "total": 4}
    page = (await client.get(f"{PATH}/{batch['id']}/items", params={"limit": 3})).json()
    rest = (await client.get(f"{PATH}/{batch['id']}/items", params={"after": page["last_id"]})).json()
    assert {video["seed"] for video in [*page["data"], *rest["data"]]} == {1, 2, 3, 9}
    assert (page["has_more"], rest["has_more"], len(rest["data"])) == (True, False, 1)
    listed = (await client.get("/v1/videos", params={"batch_id": batch["id"]})).json()["data"]
    assert {video["batch_id"] for video in listed} == {batch["id"]}
    assert farm.num_jobs() == 4


async def test_atomic_batch_with_bad_items_queues_nothing_and_names_all_problems(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    items = [{}, {"seconds": 4, "seed": -1}, {"profile": "nothing"}]
    answer = await post(client, items=items)
    locs = [error["loc"] for error in answer.json()["errors"]]
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_duration")
    assert locs == ["items[1].seconds", "items[1].seed", "items[2].profile"]
    assert farm.num_jobs() == 0


async def test_atomic_batch_that_does_not_fit_the_queue_queues_nothing(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 2}'")
    answer = await post(client, items=[{"seeds": [1, 2, 3]}])
    assert (answer.status_code, answer.json()["code"], farm.num_jobs()) == (429, "queue_full", 0)
    assert farm.execute("SELECT queued, gpu_s_reserved FROM account_usage") == [(0, 0)]


async def test_batch_that_is_not_atomic_queues_what_can_be_queued(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 2}'")
    batch = (await post(client, items=[{}, {"seconds": 4}, {}, {}], atomic=False)).json()
    codes = [item["error"] and item["error"]["code"] for item in batch["items"]]
    assert codes == [None, "unsupported_duration", None, "queue_full"]
    assert (batch["counts"]["total"], farm.num_jobs()) == (2, 2)
    assert farm.execute("SELECT total FROM batch") == [(2,)]


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"items": []}, "items"),
        ({"items": [{}, 1]}, "items[1]"),
        ({"items": [{}] * 101}, "items"),
        ({"items": [{"seeds": [1] * 101}]}, "items"),
        ({"items": [{"seeds": [1], "seed": 1}]}, "items[0].seeds"),
        ({"items": [{}], "atomic": "yes"}, "atomic"),
        ({"items": [{}], "more": 1}, "more"),
        ({"items": [{}], "metadata": {"a": 1}}, "metadata.a"),
        ({"items": [{}], "webhook": "https://in.internal/"}, "webhook.url"),
    ],
)
async def test_batch_that_cannot_be_is_refused(
    client: httpx.AsyncClient, farm: Farm, body: dict[str, Any], loc: str
) -> None:
    answer = await post(client, **body)
    assert answer.status_code == 422
    assert loc in [error["loc"] for error in answer.json()["errors"]]
    assert farm.num_jobs() == 0


@pytest.mark.req("F-31")
async def test_end_of_the_last_member_is_told_once(client: httpx.AsyncClient, farm: Farm) -> None:
    webhook = {"url": "https://hooks.example.com/", "events": ["video.batch.completed", "video.failed"]}
    batch = (await post(client, items=[{"seeds": [1, 2]}], webhook=webhook, metadata={"a": "b"})).json()
    assert batch["webhook"]["signing_secret"].startswith("whsec_")
    farm.finish()
    assert farm.execute("SELECT count(*) FROM webhook_message") == [(0,)]
    last = next(item["video_id"] for item in batch["items"])
    other = batch["items"][1]["video_id"]
    open_id = other if (await client.get(f"/v1/videos/{last}")).json()["state"] == "succeeded" else last
    await client.post(f"/v1/videos/{open_id}/cancel")
    await client.post(f"/v1/videos/{open_id}/retry")
    farm.finish()
    [(body, url)] = farm.execute(
        "SELECT m.body, e.url FROM webhook_message m JOIN webhook_delivery d ON d.message_id = m.id"
        " JOIN webhook_endpoint e ON e.id = d.endpoint_id WHERE m.type = 'video.batch.completed'"
    )
    assert url == "https://hooks.example.com/"
    assert (body["data"]["id"], body["data"]["metadata"]) == (batch["id"], {"a": "b"})
    assert body["data"]["counts"]["total"] == 2
    shown = (await client.get(f"{PATH}/{batch['id']}")).json()
    assert (shown["counts"]["completed"], shown["finished_at"] is not None) == (2, True)
    assert farm.execute("SELECT done = total FROM batch") == [(True,)]


async def test_cancel_stops_every_member(client: httpx.AsyncClient, farm: Farm) -> None:
    batch = (await post(client, items=[{"seeds": [1, 2, 3]}])).json()
    farm.start()
    answer = await client.post(f"{PATH}/{batch['id']}/cancel")
    assert answer.json()["counts"] == {"queued": 0, "in_progress": 1, "completed": 0, "failed": 2, "total": 3}
    assert farm.execute("SELECT count(*) FROM job WHERE cancel_requested_at IS NOT NULL") == [(3,)]


@pytest.mark.req("F-11")
async def test_twins_of_a_batch_make_one(client: httpx.AsyncClient, farm: Farm) -> None:
    body = {"defaults": SUBMIT, "items": [{"seeds": [1, 2]}]}
    send = [client.post(PATH, json=body, headers={"Idempotency-Key": "k"}) for _ in range(3)]
    answers = await asyncio.gather(*send)
    assert len({answer.text for answer in answers}) == 1
    assert farm.num_jobs() == 2


async def test_batches_of_two_accounts_are_apart(client: httpx.AsyncClient, farm: Farm) -> None:
    batch_id = (await post(client, items=[{}])).json()["id"]
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    answers = [
        await client.get(f"{PATH}/{batch_id}", headers=stranger),
        await client.get(f"{PATH}/{batch_id}/items", headers=stranger),
        await client.post(f"{PATH}/{batch_id}/cancel", headers=stranger),
        await client.get(f"{PATH}/batch_1"),
    ]
    assert {answer.status_code for answer in answers} == {404}
    listed = await client.get("/v1/videos", params={"batch_id": batch_id}, headers=stranger)
    assert listed.json()["data"] == []
    assert (await client.get(f"{PATH}/{batch_id}")).json()["counts"]["queued"] == 1


def profiles_of(farm: Farm) -> list[str]:
    return [profile for (profile,) in farm.execute("SELECT profile FROM job ORDER BY profile")]


def serve(farm: Farm, profile: str) -> None:
    with unit_of_work(farm.database) as conn:
        register(conn, Group(profile, "host", profile, "", f"boot-{profile}"))
        heartbeat(conn, profile, f"boot-{profile}", "ready")


async def test_low_jobs_of_a_batch_that_fill_a_wave_go_into_it(client: httpx.AsyncClient, farm: Farm) -> None:
    serve(farm, "dlo-dp4")
    items: list[dict[str, Any]] = [{"seeds": [1, 2, 3, 4, 5], "priority": "low"}]
    items += [{"priority": "low", "num_inference_steps": 5}, {"priority": "normal"}]
    items += [{"priority": "low", "profile": PROFILE}]
    assert (await post(client, items=items)).status_code == 200
    assert profiles_of(farm) == ["dlo-dp4"] * 4 + [PROFILE] * 4
    in_wave = farm.execute(
        "SELECT requested_profile, gpus, exec_timeout_s, seed FROM job"
        " WHERE profile = 'dlo-dp4' ORDER BY seed"
    )
    assert in_wave == [("auto", 1, 14_400, seed) for seed in (1, 2, 3, 4)]


@pytest.mark.parametrize("obstacle", ["not served", "paused", "narrow account", "too few"])
async def test_low_jobs_stay_with_auto_where_no_full_wave_is_to_be_had(
    client: httpx.AsyncClient, farm: Farm, obstacle: str
) -> None:
    if obstacle != "not served":
        serve(farm, "dlo-dp4")
    if obstacle == "paused":
        farm.execute("INSERT INTO profile_control (profile, paused) VALUES ('dlo-dp4', true)")
    if obstacle == "narrow account":
        farm.execute("UPDATE account SET limits = '{\"max_running\": 3}'")
    seeds = [1, 2, 3] if obstacle == "too few" else [1, 2, 3, 4]
    assert (await post(client, items=[{"seeds": seeds, "priority": "low"}])).status_code == 200
    assert profiles_of(farm) == [PROFILE] * len(seeds)


async def test_what_a_low_job_leaves_open_is_the_waves_default(client: httpx.AsyncClient, farm: Farm) -> None:
    serve(farm, "dlo-dp4")
    body = {"items": [{"prompt": "a tea seller", "seeds": [1, 2, 3, 4], "priority": "low"}]}
    assert (await client.post(PATH, json=body)).status_code == 200
    assert farm.execute("SELECT DISTINCT profile, steps, params->>'tier' FROM job") == [
        ("dlo-dp4", 100, "540p")
    ]
