"""Webhook management: what an owner may do, what nobody else may, and what is never shown."""

import base64
import json
from typing import Any

import httpx
import pytest

from farm.db.session import unit_of_work
from farm.secretbox import unseal
from farm.webhooks.deliveries import Outcome, Room, record, take_due
from farm.webhooks.endpoints import MAX_PER_ACCOUNT, MAX_PER_JOB
from farm.webhooks.messages import DEFAULT_EVENT_TYPES, EVENT_TYPES
from tests.service.api.conftest import SUBMIT, Farm

URL = "https://hooks.example.com/in"
NO_ENDPOINT = "we_01h00000000000000000000000"
NO_DELIVERY = "whd_01h00000000000000000000000"
ROUTES = [
    ("POST", "/v1/webhook_endpoints", {"url": URL}),
    ("GET", "/v1/webhook_endpoints", None),
    ("GET", "/v1/webhook_endpoints/{endpoint}", None),
    ("POST", "/v1/webhook_endpoints/{endpoint}", {"name": "x"}),
    ("DELETE", "/v1/webhook_endpoints/{endpoint}", None),
    ("POST", "/v1/webhook_endpoints/{endpoint}/rotate_secret", {}),
    ("POST", "/v1/webhook_endpoints/{endpoint}/test", {"event_type": "webhook.test"}),
    ("POST", "/v1/webhook_endpoints/{endpoint}/replay", {"since": 0}),
    ("GET", "/v1/webhook_endpoints/{endpoint}/deliveries", None),
    ("GET", "/v1/webhook_event_types", None),
    ("GET", "/v1/webhook_deliveries/{delivery}", None),
    ("POST", "/v1/webhook_deliveries/{delivery}/replay", None),
]
OF_ONE = [route for route in ROUTES if "{" in route[1]]


async def create(client: httpx.AsyncClient, **members: Any) -> dict[str, Any]:
    answer = await client.post("/v1/webhook_endpoints", json={"url": URL, **members})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def end_one(client: httpx.AsyncClient) -> str:
    """Queue a video and cancel it, so that whoever subscribed is to be told."""
    video = (await client.post("/v1/videos", json=SUBMIT)).json()
    assert (await client.post(f"/v1/videos/{video['id']}/cancel")).status_code == 200
    return video["id"]


def attempt(farm: Farm, outcome: Outcome) -> int:
    """Be a sender once: take what is due and record one outcome for all of it."""
    farm.execute("UPDATE webhook_delivery SET next_attempt_at = now() WHERE status = 'pending'")
    farm.execute("UPDATE webhook_endpoint SET paused_until = NULL")
    with unit_of_work(farm.database) as conn:
        taken = take_due(conn, Room(100, 100, 100))
        record(conn, [(delivery, outcome) for delivery in taken])
    return len(taken)


FAILED = Outcome(12, http_status=500, error="http_500", excerpt="a stack trace", resolved_ip="93.184.216.34")
TAKEN = Outcome(12, http_status=200)


async def test_an_endpoint_is_made_with_a_secret_that_is_shown_once(client, farm: Farm) -> None:
    made = await create(client, name="ours")
    secret = made.pop("signing_secret")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert made == {
        "id": made["id"],
        "object": "webhook_endpoint",
        "created_at": made["created_at"],
        "updated_at": made["created_at"],
        "name": "ours",
        "url": URL,
        "event_types": list(DEFAULT_EVENT_TYPES),
        "signing_secret_hint": f"whsec_...{secret[-4:]}",
        "video_id": None,
        "payload": "thin",
        "max_in_flight": 1,
        "enabled": True,
        "disabled_reason": None,
        "failing_since": None,
        "old_secret_expires_at": None,
        "ed25519_public_key": None,
    }
    (row,) = farm.execute("SELECT ciphertext FROM webhook_secret")
    assert unseal(farm.settings.secret_key, bytes(row.ciphertext)) == secret
    one = await client.get(f"/v1/webhook_endpoints/{made['id']}")
    listed = await client.get("/v1/webhook_endpoints")
    assert one.json() == made
    assert listed.json()["data"] == [made]
    assert secret not in one.text + listed.text


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_management_needs_its_scope(client, farm: Farm, method, path, body) -> None:
    key = farm.new_key(scopes=["videos:read", "videos:write"])
    path = path.format(endpoint=NO_ENDPOINT, delivery=NO_DELIVERY)
    answer = await client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["code"]) == (403, "insufficient_scope")


@pytest.mark.parametrize(("method", "path", "body"), OF_ONE)
async def test_another_account_finds_nothing(client, farm: Farm, method, path, body) -> None:
    endpoint = (await create(client, event_types=list(EVENT_TYPES)))["id"]
    await end_one(client)
    delivery = farm.execute("SELECT id FROM webhook_delivery")[0].id
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    path = path.format(endpoint=endpoint, delivery=delivery)
    answer = await client.request(method, path, json=body, headers=stranger)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert (await client.get("/v1/webhook_endpoints", headers=stranger)).json()["data"] == []
    assert (await client.get(f"/v1/webhook_endpoints/{endpoint}")).json()["enabled"]


@pytest.mark.parametrize(("method", "path", "body"), OF_ONE)
@pytest.mark.parametrize("is_malformed", [False, True])
async def test_what_does_not_exist_is_not_found(client, method, path, body, is_malformed) -> None:
    endpoint, delivery = ("x' OR 1=1", "a%00b") if is_malformed else (NO_ENDPOINT, NO_DELIVERY)
    answer = await client.request(method, path.format(endpoint=endpoint, delivery=delivery), json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.req("F-15")
async def test_every_problem_of_a_body_is_reported_at_once(client, farm: Farm) -> None:
    body = {"url": 5, "name": "a\x00", "event_types": [], "payload": "fat", "max_in_flight": "3", "extra": 1}
    answer = await client.post("/v1/webhook_endpoints", json=body)
    assert answer.status_code == 422
    assert {entry["loc"] for entry in answer.json()["errors"]} == set(body)
    assert farm.execute("SELECT count(*) FROM webhook_endpoint")[0].count == 0


@pytest.mark.req("F-33")
@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://localhost.internal/",
        "https://127.0.0.1/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://[::ffff:10.0.0.1]/",
        "https://user:pw@example.com/",
        "https://example.com:22/",
        "",
    ],
)
async def test_a_url_that_may_not_be_called_is_refused(client, url: str) -> None:
    endpoint = (await create(client))["id"]
    for path in ("/v1/webhook_endpoints", f"/v1/webhook_endpoints/{endpoint}"):
        answer = await client.post(path, json={"url": url})
        assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, "url")
        assert "10.0.0" not in answer.json()["detail"]


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"event_types": ["video.melted"]}, "event_types"),
        ({"event_types": "video.completed"}, "event_types"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_in_flight": 11}, "max_in_flight"),
        ({"max_in_flight": True}, "max_in_flight"),
        ({"name": "x" * 129}, "name"),
        ({"name": "\ud800"}, "name"),
        ({"enabled": "yes"}, "enabled"),
        ({"signing_secret": "whsec_x"}, "signing_secret"),
        ({"url": None}, "url"),
    ],
)
async def test_a_member_that_is_not_allowed_is_named(client, members, named) -> None:
    endpoint = (await create(client))["id"]
    content = json.dumps(members)
    headers = {"content-type": "application/json"}
    answer = await client.post(f"/v1/webhook_endpoints/{endpoint}", content=content, headers=headers)
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, named)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"[]", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b'{"url": "a", "url": "b"}', "headers": {"content-type": "application/json"}}, 400),
        ({"data": {"url": URL}}, 415),
        ({"files": {"url": (None, URL)}}, 415),
        ({"json": {"url": URL, "name": "x" * 70_000}}, 413),
        ({}, 422),
        ({"json": {"url": URL}, "headers": {"Idempotency-Key": "a b"}}, 422),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(client, options, status) -> None:
    answer = await client.post("/v1/webhook_endpoints", **options)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.req("F-11")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/webhook_endpoints", {"url": URL}),
        ("/v1/webhook_endpoints/{endpoint}", {"name": "new"}),
        ("/v1/webhook_endpoints/{endpoint}/rotate_secret", {"keep_old_secret_active_for_24_hours": True}),
        ("/v1/webhook_endpoints/{endpoint}/replay", {"since": 0}),
        ("/v1/webhook_deliveries/{delivery}/replay", None),
    ],
)
async def test_a_repeated_post_does_nothing_more_and_shows_the_same(client, farm: Farm, path, body) -> None:
    endpoint = (await create(client))["id"]
    await end_one(client)
    attempt(farm, TAKEN)
    delivery = farm.execute("SELECT id FROM webhook_delivery")[0].id
    path = path.format(endpoint=endpoint, delivery=delivery)
    headers = {"Idempotency-Key": "k1"}
    first = await client.post(path, json=body, headers=headers)
    tables = ("webhook_endpoint", "webhook_secret", "webhook_delivery")
    before = [farm.execute(f"SELECT * FROM {table} ORDER BY id") for table in tables]
    again = await client.post(path, json=body, headers=headers)
    assert (first.status_code, again.status_code, again.text) == (200, 200, first.text)
    assert again.headers["idempotent-replayed"] == "true"
    assert [farm.execute(f"SELECT * FROM {table} ORDER BY id") for table in tables] == before


async def test_an_account_has_room_for_so_many_endpoints(client, farm: Farm) -> None:
    farm.execute(
        "INSERT INTO webhook_endpoint (id, account_id, url, event_types)"
        " SELECT 'we_' || n, :account, 'https://x.example/', '{video.failed}' FROM generate_series(1, :n) n",
        account=farm.account_id,
        n=MAX_PER_ACCOUNT,
    )
    answer = await client.post("/v1/webhook_endpoints", json={"url": URL})
    assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    video = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    for _ in range(MAX_PER_JOB):
        await create(client, video_id=video)
    answer = await client.post("/v1/webhook_endpoints", json={"url": URL, "video_id": video})
    assert answer.json()["code"] == "quota_exceeded"


async def test_pages_hold_every_endpoint_once_newest_first(client) -> None:
    made = [(await create(client, name=str(number)))["id"] for number in range(5)]
    seen, after = [], None
    while True:
        params = {"limit": 2} | ({"after": after} if after else {})
        page = (await client.get("/v1/webhook_endpoints", params=params)).json()
        seen += [endpoint["id"] for endpoint in page["data"]]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert seen == sorted(made, reverse=True)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "color=red"])
async def test_a_parameter_that_nobody_knows_is_refused(client, query: str) -> None:
    answer = await client.get(f"/v1/webhook_endpoints?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")


async def test_a_page_after_nothing_is_not_found(client) -> None:
    for query in (f"after={NO_ENDPOINT}", "after=x", "after=a%00b", "video_id=a%00b"):
        assert (await client.get(f"/v1/webhook_endpoints?{query}")).status_code == 404


async def test_an_endpoint_of_one_video_hears_of_that_video_only(client) -> None:
    first, second = [(await client.post("/v1/videos", json=SUBMIT)).json()["id"] for _ in range(2)]
    made = await create(client, video_id=first)
    for video in (first, second):
        await client.post(f"/v1/videos/{video}/cancel")
    page = (await client.get(f"/v1/webhook_endpoints/{made['id']}/deliveries")).json()
    assert [delivery["video_id"] for delivery in page["data"]] == [first]
    assert (await client.get("/v1/webhook_endpoints")).json()["data"] == []
    of_video = (await client.get(f"/v1/webhook_endpoints?video_id={first}")).json()["data"]
    assert [endpoint["id"] for endpoint in of_video] == [made["id"]]


async def test_an_endpoint_of_somebody_elses_video_cannot_be_made(client, farm: Farm) -> None:
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    video = (await client.post("/v1/videos", json=SUBMIT, headers=stranger)).json()["id"]
    for video_id in (video, "video_x"):
        answer = await client.post("/v1/webhook_endpoints", json={"url": URL, "video_id": video_id})
        assert answer.status_code == 404


async def test_what_a_change_names_is_changed_and_nothing_else(client, farm: Farm) -> None:
    made = await create(client, name="old")
    path = f"/v1/webhook_endpoints/{made['id']}"
    farm.execute("UPDATE webhook_endpoint SET updated_at = updated_at - interval '1 hour'")
    same = (await client.post(path, json={"name": "old"})).json()
    assert same["updated_at"] == pytest.approx(made["updated_at"] - 3600, abs=1)
    changes = {"name": "new", "event_types": ["video.queued", "video.queued"], "payload": "full"}
    changed = (await client.post(path, json=changes)).json()
    expected = {"name": "new", "event_types": ["video.queued"], "payload": "full"}
    made.pop("signing_secret")
    assert changed == made | expected | {"updated_at": changed["updated_at"]}
    assert changed["updated_at"] >= made["updated_at"]


async def test_a_new_url_starts_with_a_clean_slate(client, farm: Farm) -> None:
    made = await create(client)
    farm.execute("UPDATE webhook_endpoint SET failing_since = now(), paused_until = now() + interval '1 h'")
    path = f"/v1/webhook_endpoints/{made['id']}"
    assert (await client.get(path)).json()["failing_since"] is not None
    changed = (await client.post(path, json={"url": "https://new.example.com/"})).json()
    assert changed["failing_since"] is None
    assert farm.execute("SELECT paused_until FROM webhook_endpoint")[0].paused_until is None


async def test_an_endpoint_that_is_off_hears_nothing_and_keeps_what_was_waiting(client, farm: Farm) -> None:
    made = await create(client)
    path = f"/v1/webhook_endpoints/{made['id']}"
    await end_one(client)
    attempt(farm, FAILED)
    off = (await client.post(path, json={"enabled": False})).json()
    assert (off["enabled"], off["disabled_reason"]) == (False, "disabled by its owner")
    await end_one(client)  # not told: it was off
    assert attempt(farm, TAKEN) == 0
    farm.execute("UPDATE webhook_delivery SET next_attempt_at = now() + interval '1 day'")
    on = (await client.post(path, json={"enabled": True})).json()
    assert (on["enabled"], on["disabled_reason"], on["failing_since"]) == (True, None, None)
    (row,) = farm.execute("SELECT status, next_attempt_at <= now() AS is_due FROM webhook_delivery")
    assert (row.status, row.is_due) == ("pending", True)
    assert attempt(farm, TAKEN) == 1


async def test_an_endpoint_is_disabled_after_three_days_without_success(client, farm: Farm) -> None:
    made = await create(client)
    await end_one(client)
    await end_one(client)
    farm.execute("UPDATE webhook_endpoint SET failing_since = now() - interval '71 hours'")
    assert attempt(farm, FAILED) == 1
    path = f"/v1/webhook_endpoints/{made['id']}"
    assert (await client.get(path)).json()["enabled"]
    farm.execute("UPDATE webhook_endpoint SET failing_since = now() - interval '73 hours'")
    assert attempt(farm, FAILED) == 1
    off = (await client.get(path)).json()
    assert (off["enabled"], off["disabled_reason"]) == (False, "no delivery succeeded for 3 days")
    await client.post(path, json={"enabled": True})
    assert attempt(farm, TAKEN) == 1  # the backlog is there still, one at a time
    assert attempt(farm, TAKEN) == 1


async def test_one_success_in_between_keeps_an_endpoint_on(client, farm: Farm) -> None:
    made = await create(client)
    await end_one(client)
    await end_one(client)
    farm.execute("UPDATE webhook_endpoint SET failing_since = now() - interval '73 hours'")
    attempt(farm, TAKEN)
    attempt(farm, FAILED)
    assert (await client.get(f"/v1/webhook_endpoints/{made['id']}")).json()["enabled"]


async def test_a_rotation_shows_the_new_secret_once_and_ends_the_old_one(client, farm: Farm) -> None:
    made = await create(client)
    path = f"/v1/webhook_endpoints/{made['id']}"
    kept = await client.post(f"{path}/rotate_secret", json={"keep_old_secret_active_for_24_hours": True})
    assert kept.json()["signing_secret"] != made["signing_secret"]
    assert kept.json()["old_secret_expires_at"] == pytest.approx(kept.json()["updated_at"] + 86_400, abs=2)
    assert kept.json()["signing_secret_hint"].endswith(kept.json()["signing_secret"][-4:])
    assert farm.execute("SELECT count(*) FROM webhook_secret")[0].count == 2
    at_once = (await client.post(f"{path}/rotate_secret")).json()
    assert at_once["old_secret_expires_at"] is None
    (row,) = farm.execute("SELECT ciphertext FROM webhook_secret")
    assert unseal(farm.settings.secret_key, bytes(row.ciphertext)) == at_once["signing_secret"]


async def test_public_keys_are_told_to_receivers_of_the_account(client, farm: Farm) -> None:
    made = await create(client, ed25519=True)
    await create(client)
    reader = {"Authorization": f"Bearer {farm.new_key(scopes=['videos:read'])}"}
    (key,) = (await client.get("/v1/webhooks/jwks.json", headers=reader)).json()["keys"]
    raw = base64.urlsafe_b64decode(key["x"] + "=")
    assert made["ed25519_public_key"] == "whpk_" + base64.b64encode(raw).decode()
    expected = {"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "webhook_endpoint_id": made["id"]}
    assert {name: key[name] for name in expected} == expected
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    assert (await client.get("/v1/webhooks/jwks.json", headers=stranger)).json() == {"keys": []}
    path = f"/v1/webhook_endpoints/{made['id']}"
    await client.post(f"{path}/rotate_secret", json={"keep_old_secret_active_for_24_hours": True})
    assert len((await client.get("/v1/webhooks/jwks.json")).json()["keys"]) == 2
    off = (await client.post(path, json={"ed25519": False})).json()
    assert off["ed25519_public_key"] is None
    assert (await client.get("/v1/webhooks/jwks.json")).json() == {"keys": []}
    on = (await client.post(path, json={"ed25519": True})).json()
    assert on["ed25519_public_key"] != made["ed25519_public_key"]


async def test_a_deleted_endpoint_is_gone_and_what_waited_is_canceled(client, farm: Farm) -> None:
    made = await create(client)
    await end_one(client)
    path = f"/v1/webhook_endpoints/{made['id']}"
    assert (await client.delete(path)).json() == {
        "id": made["id"],
        "object": "webhook_endpoint.deleted",
        "deleted": True,
    }
    for method, gone in (("GET", path), ("DELETE", path), ("GET", f"{path}/deliveries")):
        assert (await client.request(method, gone)).status_code == 404
    (row,) = farm.execute("SELECT id, status FROM webhook_delivery")
    assert row.status == "canceled"
    assert (await client.get(f"/v1/webhook_deliveries/{row.id}")).json()["status"] == "canceled"
    assert (await client.post(f"/v1/webhook_deliveries/{row.id}/replay")).status_code == 404
    assert farm.execute("SELECT count(*) FROM webhook_secret")[0].count == 0
    await end_one(client)
    assert attempt(farm, TAKEN) == 0


async def test_a_delivery_on_the_wire_is_not_repeated_after_its_endpoint_was_deleted(
    client, farm: Farm
) -> None:
    made = await create(client)
    await end_one(client)
    with unit_of_work(farm.database) as conn:
        (delivery,) = take_due(conn, Room(1, 1, 1))
    await client.delete(f"/v1/webhook_endpoints/{made['id']}")
    with unit_of_work(farm.database) as conn:
        assert record(conn, [(delivery, FAILED)]).kept == frozenset()
    assert farm.execute("SELECT status FROM webhook_delivery")[0].status == "canceled"


async def test_event_types_are_listed(client) -> None:
    listed = (await client.get("/v1/webhook_event_types")).json()
    assert listed == {"object": "list", "data": list(EVENT_TYPES)}
    await create(client, event_types=listed["data"])
