"""API keys over HTTP: made once, never stronger than who makes them, gone within five seconds."""

from datetime import UTC, datetime, timedelta

import httpx
import pytest

from api import auth
from farm.accounts import create_key
from farm.db.session import unit_of_work
from tests.service.api.conftest import Farm


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_new_key_works_and_its_text_is_shown_once(client: httpx.AsyncClient) -> None:
    body = {"name": "ci", "scopes": ["videos:read"], "cidrs": ["127.0.0.0/8"]}
    made = (await client.post("/v1/keys", json=body)).json()
    listed = await client.get("/v1/keys")
    assert (await client.get("/v1/videos", headers=bearer(made["key"]))).status_code == 200
    assert (await client.post("/v1/videos", json={}, headers=bearer(made["key"]))).status_code == 403
    assert made["key"] not in listed.text
    newest = listed.json()["data"][0]
    assert {name: newest[name] for name in ("id", "name", "scopes", "cidrs")} == {"id": made["id"], **body}


async def test_repeated_creation_shows_the_same_key(client: httpx.AsyncClient, farm: Farm) -> None:
    headers = {"Idempotency-Key": "k"}
    first, second = [await client.post("/v1/keys", json={}, headers=headers) for _ in range(2)]
    assert first.json()["key"] == second.json()["key"]
    assert farm.execute("SELECT count(*) FROM api_key") == [(2,)]


async def test_revoked_key_is_refused_at_once_here(client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/keys", json={})).json()
    assert (await client.get("/v1/keys", headers=bearer(made["key"]))).status_code == 200
    answer = await client.delete(f"/v1/keys/{made['id']}")
    assert answer.json() == {"id": made["id"], "object": "api_key.revoked", "revoked": True}
    assert (await client.get("/v1/keys", headers=bearer(made["key"]))).status_code == 401
    assert (await client.delete(f"/v1/keys/{made['id']}")).status_code == 404


async def test_other_processes_notice_a_revocation_within_five_seconds(
    client: httpx.AsyncClient, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [1000.0]
    monkeypatch.setattr(auth.KeyCache.__init__, "__defaults__", (lambda: at[0],))
    made = (await client.post("/v1/keys", json={})).json()
    async with farm.client(key=made["key"]) as other:
        assert (await other.get("/v1/keys")).status_code == 200
        await client.delete(f"/v1/keys/{made['id']}")
        at[0] += 5.0
        assert (await other.get("/v1/keys")).status_code == 401


async def test_rotation_lets_the_old_key_live_on_for_the_overlap_only(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    old = (await client.post("/v1/keys", json={"name": "app", "scopes": ["videos:read"]})).json()
    new = (await client.post(f"/v1/keys/{old['id']}/rotate", json={"overlap_seconds": 600})).json()
    assert (new["name"], new["scopes"]) == ("app", ["videos:read"])
    for key in (old, new):
        assert (await client.get("/v1/videos", headers=bearer(key["key"]))).status_code == 200
    [(left_s,)] = farm.execute(
        "SELECT extract(epoch FROM expires_at - now()) FROM api_key WHERE id8 = :id", id=old["id"]
    )
    assert 540 < left_s <= 600
    newest = (await client.post(f"/v1/keys/{new['id']}/rotate")).json()
    assert (await client.get("/v1/videos", headers=bearer(new["key"]))).status_code == 401
    assert (await client.get("/v1/videos", headers=bearer(newest["key"]))).status_code == 200
    assert (await client.post(f"/v1/keys/{new['id']}/rotate")).status_code == 404


async def test_nobody_makes_or_takes_a_key_that_may_do_more(client: httpx.AsyncClient, farm: Farm) -> None:
    strong = (await client.get("/v1/keys")).json()["data"][0]["id"]
    with unit_of_work(farm.database) as conn:
        weak = create_key(
            conn,
            farm.account_id,
            farm.settings.key_pepper,
            scopes=("keys:manage", "videos:read"),
            cidrs=("127.0.0.0/8",),
            expires_at=datetime.now(UTC) + timedelta(hours=1),
        ).text
    headers = bearer(weak)
    far = (datetime.now(UTC) + timedelta(days=9)).isoformat()
    refused = [
        await client.post("/v1/keys", json={"scopes": ["videos:write"]}, headers=headers),
        await client.post("/v1/keys", json={"scopes": ["admin:write"]}),
        await client.post("/v1/keys", json={"cidrs": ["0.0.0.0/0"]}, headers=headers),
        await client.post("/v1/keys", json={"expires_at": far}, headers=headers),
        await client.post(f"/v1/keys/{strong}/rotate", headers=headers),
    ]
    assert [answer.status_code for answer in refused] == [403, 403, 422, 422, 403]
    child = (await client.post("/v1/keys", json={}, headers=headers)).json()
    assert child["scopes"] == ["keys:manage", "videos:read"]
    assert child["cidrs"] == ["127.0.0.0/8"]
    assert child["expires_at"] is not None


async def test_two_accounts_do_not_see_or_touch_each_others_keys(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    mine = (await client.get("/v1/keys")).json()["data"][0]["id"]
    stranger = bearer(farm.new_key("other"))
    assert mine not in (await client.get("/v1/keys", headers=stranger)).text
    assert (await client.delete(f"/v1/keys/{mine}", headers=stranger)).status_code == 404
    assert (await client.post(f"/v1/keys/{mine}/rotate", headers=stranger)).status_code == 404


@pytest.mark.req("F-50")
async def test_changes_of_keys_are_written_down_once_and_without_secrets(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    mine, twice = f"key:{farm.key.split('_')[2][:8]}", {"Idempotency-Key": "k"}
    body = {"name": "ci", "scopes": ["videos:read"]}
    made, _ = [(await client.post("/v1/keys", json=body, headers=twice)).json() for _ in range(2)]
    new = (await client.post(f"/v1/keys/{made['id']}/rotate", json={"overlap_seconds": 60})).json()
    assert (await client.delete(f"/v1/keys/{new['id']}")).status_code == 200
    assert (await client.delete(f"/v1/keys/{new['id']}")).status_code == 404
    assert (await client.post("/v1/keys", json={"scopes": ["admin:write"]})).status_code == 403
    rows = farm.execute("SELECT actor, action, target, before, after, ip FROM audit_log ORDER BY id")
    assert [(actor, action, target) for actor, action, target, *_ in rows] == [
        (mine, "key.create", made["id"]),
        (mine, "key.rotate", made["id"]),
        (mine, "key.create", new["id"]),
        (mine, "key.revoke", new["id"]),
    ]
    created, rotated, replacing, revoked = rows
    assert created.before is None
    assert created.after.items() >= {"account": farm.account_id, **body, "expires_at": None}.items()
    assert rotated.before == created.after
    assert rotated.after["replaced_by"] == new["id"]
    assert rotated.after["expires_at"] is not None
    assert replacing.after["replaces"] == made["id"]
    assert (revoked.before["open"], revoked.after["open"]) == (True, False)
    assert {row.ip for row in rows} == {"127.0.0.1"}
    assert not [part for part in (made["key"], new["key"]) if part.split("_")[3] in str(rows)]


@pytest.mark.parametrize(
    "body", [{"scopes": ["videos:all"]}, {"scopes": []}, {"cidrs": ["here"]}, {"name": "a\0"}, {"nam": "x"}]
)
async def test_key_that_cannot_be_is_refused(client: httpx.AsyncClient, body: dict) -> None:
    assert (await client.post("/v1/keys", json=body)).status_code in {403, 422}


async def test_all_problems_of_a_new_key_are_named_at_once(client: httpx.AsyncClient) -> None:
    body = {"scopes": ["videos:all", "more", "videos:read"], "cidrs": ["here", "10.0.0.0/8"], "nam": "x"}
    answer = await client.post("/v1/keys", json=body)
    said = {error["loc"]: error["msg"] for error in answer.json()["errors"]}
    assert (answer.status_code, list(said)) == (422, ["nam", "scopes", "cidrs"])
    assert said["nam"] == "nam is not supported; there are name, scopes, cidrs, expires_at"
    assert said["scopes"].startswith("unknown scope more, videos:all; there are ")
    assert said["cidrs"] == "here is not a network such as 10.0.0.0/8"
