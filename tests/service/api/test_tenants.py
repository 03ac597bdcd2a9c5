"""Two accounts cannot see, guess or disturb each other: every route and every place that takes an id.

The table below is checked against the application's own list of routes, so a route that is added without a
line here fails the first test.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from api.turns import AT_A_TIME
from tests.service.api.conftest import SUBMIT, Farm, image_bytes
from tests.service.api.test_webhooks import FAILED, attempt, create

# Bodies that each route would take from the owner; a route that takes none is not named.
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("PATCH", "/v1/videos/{video_id}"): {"priority": -1},
    ("PATCH", "/v1/webhook_endpoints/{endpoint_id}"): {"enabled": False},
    ("POST", "/v1/webhook_endpoints/{endpoint_id}"): {"enabled": False},
    ("POST", "/v1/webhook_endpoints/{endpoint_id}/replay"): {"since": 0},
}
# Answered for nobody's video, since the model does not do it.
NOT_SERVED = {"remix", "edits", "extensions", "characters"}
# What holds rows of an account; none of it may change by what a stranger does.
TABLES = (
    "job",
    "job_event",
    "batch",
    "asset",
    "webhook_endpoint",
    "webhook_secret",
    "webhook_message",
    "webhook_delivery",
    "api_key",
)


@dataclass
class Owned:
    """What the first account has, by the name of the path parameter that takes its id."""

    ids: dict[str, str] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)


@pytest.fixture
async def owned(client: httpx.AsyncClient, farm: Farm) -> Owned:
    """Give the first account one of everything that has an id."""
    image = await client.post("/v1/assets", files={"file": image_bytes()})
    finished = await client.post("/v1/videos", json={**SUBMIT, "seed": 5, "reuse": "exact"})
    farm.finish()
    endpoint = await create(client)
    batch = await client.post("/v1/videos/batches", json={"items": [{**SUBMIT, "priority": -1}]})
    waiting = await client.post("/v1/videos", json={**SUBMIT, "metadata": {"secret": "plan"}, "user": "u1"})
    gone = await client.post("/v1/videos", json=SUBMIT)
    await client.post(f"/v1/videos/{gone.json()['id']}/cancel")
    while attempt(farm, FAILED):
        pass
    (delivery,) = farm.execute("SELECT id FROM webhook_delivery LIMIT 1")
    key = await client.post("/v1/keys", json={"name": "second"})
    ids = {
        "video_id": waiting.json()["id"],
        "batch_id": batch.json()["id"],
        "endpoint_id": endpoint["id"],
        "delivery_id": delivery.id,
        "asset_id": image.json()["id"],
        "key_id": key.json()["id"],
    }
    return Owned(ids, {"finished": finished.json()["id"], "canceled": gone.json()["id"]})


@pytest.fixture
async def stranger(farm: Farm, client: httpx.AsyncClient, owned: Owned) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of another account with every scope, on the same application."""
    del owned
    headers = {"Authorization": f"Bearer {farm.new_key('other')}"}
    transport = client._transport
    async with httpx.AsyncClient(transport=transport, base_url="http://farm", headers=headers) as made:
        yield made


def routes_with_ids(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    app = client._transport.app  # type: ignore[attr-defined] # the transport of the tests
    return sorted(
        (method, route.path)
        for router in app.state.routers
        for route in router.routes
        if isinstance(route, APIRoute) and "{" in route.path
        for method in route.methods
    )


def snapshot(farm: Farm) -> dict[str, list[Any]]:
    account = "(SELECT id FROM account WHERE name = 'acme')"
    of_account = {
        "job_event": f"job_id IN (SELECT id FROM job WHERE account_id = {account})",
        "webhook_secret": f"endpoint_id IN (SELECT id FROM webhook_endpoint WHERE account_id = {account})",
        "webhook_delivery": f"endpoint_id IN (SELECT id FROM webhook_endpoint WHERE account_id = {account})",
    }
    found = {}
    for table in TABLES:
        where = of_account.get(table, f"account_id = {account}")
        rows = farm.execute(f"SELECT to_jsonb(t) - 'last_used_at' FROM {table} t WHERE {where} ORDER BY 1")
        assert rows, table
        found[table] = rows
    return found


def without_ids(answer: httpx.Response) -> dict[str, Any]:
    """Return a refusal without what is different at every request, and the id that was asked for."""
    text = re.sub(r"(video|batch|we|whd|asset)_[0-9a-z]{26}", "ID", answer.text)
    body: dict[str, Any] = httpx.Response(200, text=text).json()
    del body["instance"]
    return body


async def test_every_route_with_an_id_is_as_if_the_thing_did_not_exist(
    client: httpx.AsyncClient, stranger: httpx.AsyncClient, owned: Owned, farm: Farm
) -> None:
    routes = routes_with_ids(client)
    assert len(routes) > 25
    before = snapshot(farm)
    for method, path in routes:
        names = re.findall(r"\{(\w+)\}", path)
        assert set(names) <= set(owned.ids), f"{path} takes an id that this test does not know"
        if path.rpartition("/")[2] in NOT_SERVED:
            continue
        body = BODIES.get((method, path))
        theirs = await stranger.request(method, path.format(**owned.ids), json=body)
        nobodys = {name: value[:-8] + "00000000" for name, value in owned.ids.items()}
        nowhere = await stranger.request(method, path.format(**nobodys), json=body)
        assert (theirs.status_code, theirs.json()["code"]) == (404, "not_found"), (method, path)
        said = json.dumps(without_ids(theirs))
        for name in names:  # an answer may repeat the id that was asked for, and nothing else may differ
            said = said.replace(owned.ids[name], nobodys[name])
        assert json.loads(said) == without_ids(nowhere), (method, path)
    assert snapshot(farm) == before


async def test_ids_in_queries_and_bodies_are_as_if_the_things_did_not_exist(
    stranger: httpx.AsyncClient, owned: Owned, farm: Farm
) -> None:
    before = snapshot(farm)
    ids, endpoint = owned.ids, await create(stranger)
    asset = {**SUBMIT, "input_reference": {"asset_id": ids["asset_id"]}}
    answers = {
        "after": await stranger.get("/v1/videos", params={"after": ids["video_id"]}),
        "endpoints after": await stranger.get("/v1/webhook_endpoints", params={"after": ids["endpoint_id"]}),
        "deliveries after": await stranger.get(
            f"/v1/webhook_endpoints/{endpoint['id']}/deliveries", params={"after": ids["delivery_id"]}
        ),
        "endpoint of a video": await stranger.post(
            "/v1/webhook_endpoints", json={"url": "https://b.example/x", "video_id": ids["video_id"]}
        ),
        "asset": await stranger.post("/v1/videos", json=asset),
        "asset in a batch": await stranger.post("/v1/videos/batches", json={"items": [asset]}),
    }
    assert {name: answer.status_code for name, answer in answers.items() if answer.is_success} == {}
    for name, answer in answers.items():
        assert answer.status_code in {404, 422}, (name, answer.text)
    filters = ({"batch_id": ids["batch_id"]}, {"user": "u1"}, {"metadata[secret]": "plan"}, {})
    for params in filters:
        assert (await stranger.get("/v1/videos", params=params)).json()["data"] == []
    listed = await stranger.get("/v1/webhook_endpoints", params={"video_id": ids["video_id"]})
    assert listed.status_code == 404 or listed.json()["data"] == []
    assert len((await stranger.get("/v1/keys")).json()["data"]) == 1
    assert snapshot(farm) == before


@pytest.mark.req("F-11")
async def test_idempotency_key_of_another_account_is_another_key(
    client: httpx.AsyncClient, stranger: httpx.AsyncClient
) -> None:
    headers = {"Idempotency-Key": "order-1"}
    mine = await client.post("/v1/videos", json=SUBMIT, headers=headers)
    theirs = await stranger.post("/v1/videos", json=SUBMIT, headers=headers)
    other = await stranger.post("/v1/videos", json={**SUBMIT, "seed": 9}, headers=headers)
    assert mine.json()["id"] != theirs.json()["id"]
    assert "idempotent-replayed" not in theirs.headers
    assert other.json()["code"] == "idempotency_key_reused"


async def test_finished_video_of_another_account_is_not_reused(
    client: httpx.AsyncClient, stranger: httpx.AsyncClient, owned: Owned
) -> None:
    wanted = {**SUBMIT, "seed": 5, "reuse": "exact"}
    mine, theirs = (
        await client.post("/v1/videos", json=wanted),
        await stranger.post("/v1/videos", json=wanted),
    )
    assert (mine.json()["id"], mine.headers["x-reused-video"]) == (owned.extra["finished"], "true")
    assert theirs.json()["state"] == "queued"
    assert "x-reused-video" not in theirs.headers


async def test_same_picture_is_another_asset_for_another_account(
    stranger: httpx.AsyncClient, owned: Owned, farm: Farm
) -> None:
    made = (await stranger.post("/v1/assets", files={"file": image_bytes()})).json()
    assert made["id"] != owned.ids["asset_id"]
    assert made["refs"] == 0
    assert (await stranger.delete(f"/v1/assets/{made['id']}")).status_code == 200
    kept = farm.execute(
        "SELECT deleted_at IS NULL AND expires_at > now() FROM asset WHERE id = :i", i=owned.ids["asset_id"]
    )
    assert kept == [(True,)]


@pytest.mark.req("F-12")
async def test_limits_of_one_account_are_not_used_up_by_another(farm: Farm, owned: Owned) -> None:
    del owned
    rate = farm.settings.rate.model_copy(update={"requests_per_minute": 8, "submits_per_minute": 2})
    async with farm.client(key=farm.new_key("greedy"), rate=rate) as app:
        greedy = [await app.post("/v1/videos", json=SUBMIT) for _ in range(4)]
        key = {"Authorization": f"Bearer {farm.new_key('modest')}"}
        modest = await app.post("/v1/videos", json=SUBMIT, headers=key)
        usage = (await app.get("/v1/usage", headers=key)).json()
    assert [answer.status_code for answer in greedy] == [200, 200, 429, 429]
    assert modest.status_code == 200
    assert usage["queued"] == 1


async def test_refusals_and_lists_name_nothing_of_another_account(
    stranger: httpx.AsyncClient, owned: Owned
) -> None:
    texts = [
        (await stranger.get(path)).text
        for path in (
            "/v1/videos",
            "/v1/usage",
            "/v1/profiles",
            "/v1/models",
            "/v1/keys",
            "/v1/webhook_endpoints",
        )
    ]
    secrets = [*owned.ids.values(), *owned.extra.values(), "plan", "acme"]
    assert [secret for secret in secrets for text in texts if secret in text] == []


async def test_many_submits_of_one_account_at_once_hold_up_no_other(farm: Farm) -> None:
    """Its row is locked meanwhile, so all its submits stand still; they must not stand on the connections."""
    key = {"Authorization": f"Bearer {farm.new_key('modest')}"}
    async with farm.client(key=farm.new_key("greedy")) as app:
        with farm.database.begin() as conn:
            # The lock is held as long as a slow machine needs for the submit below.
            conn.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            theirs = "SELECT id FROM account WHERE name = 'greedy'"
            conn.exec_driver_sql(f"SELECT 1 FROM account_usage WHERE account_id = ({theirs}) FOR UPDATE")
            greedy = [asyncio.create_task(app.post("/v1/videos", json=SUBMIT)) for _ in range(40)]
            modest = await app.post("/v1/videos", json=SUBMIT, headers=key)
            held_up = farm.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND wait_event_type = 'Lock'"
            )
        answers = await asyncio.gather(*greedy)
    assert modest.status_code == 200
    assert held_up[0][0] <= AT_A_TIME
    assert {answer.status_code for answer in answers} <= {200, 503}
