"""The delivery log over HTTP: filters, pages, what is hidden, and replays."""

from typing import Any

import httpx
import pytest

from tests.service.api.conftest import Farm
from tests.service.api.test_webhooks import FAILED, TAKEN, attempt, create, end_one


@pytest.fixture
async def endpoint(client) -> str:
    return (await create(client))["id"]


async def log_of(client: httpx.AsyncClient, endpoint: str, **params: Any) -> list[dict[str, Any]]:
    answer = await client.get(f"/v1/webhook_endpoints/{endpoint}/deliveries", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def exhaust(farm: Farm) -> None:
    """Let every delivery fail until it is a dead letter."""
    while attempt(farm, FAILED):
        pass


async def test_a_delivery_is_shown_with_its_event_and_attempts(client, farm: Farm, endpoint) -> None:
    video = await end_one(client)
    attempt(farm, FAILED)
    (listed,) = await log_of(client, endpoint)
    event_id = farm.execute("SELECT id FROM webhook_message")[0].id
    assert listed == {
        "id": listed["id"],
        "object": "webhook_delivery",
        "webhook_endpoint_id": endpoint,
        "event_id": event_id,
        "event_type": "video.canceled",
        "video_id": video,
        "status": "pending",
        "attempts": 1,
        "max_attempts": 10,
        "created_at": listed["created_at"],
        "next_attempt_at": listed["next_attempt_at"],
        "last_status_code": 500,
        "last_error": "http_500",
    }
    one = (await client.get(f"/v1/webhook_deliveries/{listed['id']}")).json()
    assert one["event"]["data"]["id"] == video
    (line,) = one["attempt_log"]
    assert (line["n"], line["status_code"], line["error"], line["duration_ms"]) == (1, 500, "http_500", 12)


@pytest.mark.req("F-33")
async def test_neither_the_answer_nor_the_address_of_a_receiver_is_shown(
    client, farm: Farm, endpoint
) -> None:
    await end_one(client)
    attempt(farm, FAILED)
    (listed,) = await log_of(client, endpoint)
    text = (await client.get(f"/v1/webhook_deliveries/{listed['id']}")).text
    assert FAILED.excerpt not in text
    assert FAILED.resolved_ip not in text
    (kept,) = farm.execute("SELECT response_excerpt, resolved_ip FROM webhook_attempt")
    assert (kept.response_excerpt, kept.resolved_ip) == (FAILED.excerpt, FAILED.resolved_ip)


async def test_filters_choose_by_status_and_type(client, farm: Farm) -> None:
    endpoint = (await create(client, event_types=["video.queued", "video.canceled"]))["id"]
    await end_one(client)
    attempt(farm, TAKEN)
    types = [row["event_type"] for row in await log_of(client, endpoint)]
    assert sorted(types) == ["video.canceled", "video.queued"]
    (waiting,) = await log_of(client, endpoint, status="pending")
    (done,) = await log_of(client, endpoint, status="ok", event_type="video.queued")
    assert {waiting["event_type"], done["event_type"]} == set(types)
    assert await log_of(client, endpoint, status="dead") == []


@pytest.mark.parametrize("query", ["status=lost", "event_type=video.melted", "limit=1000", "sort=asc"])
async def test_a_filter_that_nobody_knows_is_refused(client, endpoint, query: str) -> None:
    answer = await client.get(f"/v1/webhook_endpoints/{endpoint}/deliveries?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")


async def test_pages_hold_every_delivery_once_while_more_arrive(client, endpoint) -> None:
    for _ in range(5):
        await end_one(client)
    before = {row["id"] for row in await log_of(client, endpoint)}
    first = await log_of(client, endpoint, limit=3)
    await end_one(client)
    rest = await log_of(client, endpoint, limit=10, after=first[-1]["id"])
    assert [row["id"] for row in first + rest] == sorted(before, reverse=True)


async def test_a_dead_letter_goes_out_again_under_its_id_with_a_new_schedule(
    client, farm: Farm, endpoint
) -> None:
    await end_one(client)
    exhaust(farm)
    (dead,) = await log_of(client, endpoint, status="dead")
    assert dead["attempts"] == 10
    replayed = (await client.post(f"/v1/webhook_deliveries/{dead['id']}/replay")).json()
    assert (replayed["status"], replayed["event_id"]) == ("pending", dead["event_id"])
    assert (replayed["attempts"], replayed["max_attempts"]) == (10, 20)
    attempt(farm, FAILED)
    (delay,) = farm.execute("SELECT extract(epoch FROM next_attempt_at - now()) AS s FROM webhook_delivery")
    assert delay.s < 7  # the first step of the schedule
    exhaust(farm)
    assert (await log_of(client, endpoint))[0]["attempts"] == 20
    await client.post(f"/v1/webhook_deliveries/{dead['id']}/replay")
    attempt(farm, TAKEN)
    detail = (await client.get(f"/v1/webhook_deliveries/{dead['id']}")).json()
    assert (detail["status"], [line["n"] for line in detail["attempt_log"]]) == ("ok", list(range(1, 22)))


async def test_a_delivery_that_was_taken_can_be_sent_again(client, farm: Farm, endpoint) -> None:
    await end_one(client)
    attempt(farm, TAKEN)
    (done,) = await log_of(client, endpoint)
    assert (await client.post(f"/v1/webhook_deliveries/{done['id']}/replay")).json()["status"] == "pending"
    assert attempt(farm, TAKEN) == 1


async def test_a_delivery_that_waits_is_brought_forward(client, farm: Farm, endpoint) -> None:
    await end_one(client)
    farm.execute("UPDATE webhook_delivery SET next_attempt_at = now() + interval '1 day'")
    (waiting,) = await log_of(client, endpoint)
    await client.post(f"/v1/webhook_deliveries/{waiting['id']}/replay")
    (row,) = farm.execute("SELECT next_attempt_at <= now() AS is_due, max_attempts FROM webhook_delivery")
    assert (row.is_due, row.max_attempts) == (True, 10)


async def test_nothing_is_replayed_to_an_endpoint_that_is_off(client, farm: Farm, endpoint) -> None:
    await end_one(client)
    exhaust(farm)
    await client.post(f"/v1/webhook_endpoints/{endpoint}", json={"enabled": False})
    (dead,) = await log_of(client, endpoint)
    for path, body in (
        (f"/v1/webhook_deliveries/{dead['id']}/replay", None),
        (f"/v1/webhook_endpoints/{endpoint}/replay", {"since": 0}),
        (f"/v1/webhook_endpoints/{endpoint}/test", {"event_type": "webhook.test"}),
    ):
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "endpoint_disabled")


async def test_a_message_is_replayable_for_thirty_days(client, farm: Farm, endpoint) -> None:
    await end_one(client)
    exhaust(farm)
    (dead,) = await log_of(client, endpoint)
    path = f"/v1/webhook_deliveries/{dead['id']}/replay"
    farm.execute("UPDATE webhook_message SET created_at = now() - interval '31 days'")
    answer = await client.post(path)
    assert (answer.status_code, answer.json()["code"]) == (410, "content_expired")
    in_range = await client.post(f"/v1/webhook_endpoints/{endpoint}/replay", json={"since": 0})
    assert in_range.json()["replayed"] == 0
    farm.execute("UPDATE webhook_message SET created_at = now() - interval '29 days'")
    assert (await client.post(path)).status_code == 200


async def test_a_range_replays_dead_letters_or_everything(client, farm: Farm, endpoint) -> None:
    for days in (5, 3, 1):
        await end_one(client)
        farm.execute(
            "UPDATE webhook_message SET created_at = now() - make_interval(days => :days)"
            " WHERE created_at > now() - interval '1 hour'",
            days=days,
        )
    exhaust(farm)
    newest = farm.execute("SELECT max(id) AS id FROM webhook_delivery")[0].id
    farm.execute("UPDATE webhook_delivery SET status = 'ok' WHERE id = :id", id=newest)
    (now_s,) = farm.execute("SELECT extract(epoch FROM now())::int AS s")
    path = f"/v1/webhook_endpoints/{endpoint}/replay"
    day_s = 86_400

    async def replayed(**body: Any) -> int:
        answer = (await client.post(path, json=body)).json()
        assert answer["object"] == "webhook_endpoint.replay"
        farm.execute("UPDATE webhook_delivery SET status = 'dead' WHERE id <> :id", id=newest)
        farm.execute("UPDATE webhook_delivery SET status = 'ok' WHERE id = :id", id=newest)
        return answer["replayed"]

    assert await replayed(since=now_s.s - 4 * day_s) == 1
    assert await replayed(since=now_s.s - 4 * day_s, only_failed=False) == 2
    assert await replayed(since=0, until=now_s.s - 2 * day_s) == 2
    assert await replayed(since=now_s.s - 4 * day_s, until=now_s.s - 4 * day_s) == 0


@pytest.mark.parametrize("body", [{}, {"since": -1}, {"since": "yesterday"}, {"since": 0, "status": "ok"}])
async def test_a_range_is_checked(client, endpoint, body) -> None:
    answer = await client.post(f"/v1/webhook_endpoints/{endpoint}/replay", json=body)
    assert answer.status_code == 422


async def test_a_range_that_is_too_long_replays_nothing(client, farm: Farm, endpoint, monkeypatch) -> None:
    monkeypatch.setattr("farm.webhooks.delivery_log.MAX_REPLAYED", 1)
    await end_one(client)
    await end_one(client)
    exhaust(farm)
    answer = await client.post(f"/v1/webhook_endpoints/{endpoint}/replay", json={"since": 0})
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, "since")
    assert {row["status"] for row in await log_of(client, endpoint)} == {"dead"}
