"""Rate limits and quotas: exact where the database counts them, never an error without Redis (F-12)."""

import asyncio

import httpx
import pytest
from sqlalchemy import text

from farm.db.session import unit_of_work
from farm.jobs.lifecycle import finish_cancel
from farm.profile_control import pause_profile
from farm.settings import RateSettings
from tests.service.api.conftest import SUBMIT, Farm

pytestmark = pytest.mark.req("F-12")
NOWHERE = "redis://127.0.0.1:1/0"


def rate(requests: int, submits: int) -> RateSettings:
    return RateSettings(requests_per_minute=requests, submits_per_minute=submits)


@pytest.mark.parametrize("broker_url", [None, NOWHERE], ids=["redis", "without redis"])
async def test_one_request_too_many_is_told_when_to_come_again(farm: Farm, broker_url: str | None) -> None:
    changes = {"redis_url": broker_url} if broker_url else {}
    async with farm.client(rate=rate(3, 9), **changes) as client:
        answers = [await client.get("/v1/videos") for _ in range(4)]
        other = await client.get("/v1/videos", headers={"Authorization": f"Bearer {farm.new_key()}"})
        unknown = await client.get("/v1/videos", headers={"Authorization": "Bearer x"})
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    refused = answers[-1]
    assert refused.json()["code"] == "rate_limited"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert [answer.headers["ratelimit"].split(";")[1] for answer in answers] == ["r=2", "r=1", "r=0", "r=0"]
    assert other.status_code == 200
    for answer in (*answers, unknown):
        assert answer.headers["ratelimit-policy"] == '"requests";q=3;w=60, "submits";q=9;w=60'


async def test_two_processes_share_one_bucket(farm: Farm) -> None:
    async with farm.client(rate=rate(3, 9)) as one, farm.client(rate=rate(3, 9)) as two:
        codes = [(await client.get("/v1/videos")).status_code for client in (one, two, one, two)]
    assert codes == [200, 200, 200, 429]


async def test_submits_are_counted_by_account_and_replays_are_not(farm: Farm) -> None:
    async with farm.client(rate=rate(99, 2)) as client:
        first = await client.post("/v1/videos", json=SUBMIT, headers={"Idempotency-Key": "k"})
        twins = [
            await client.post("/v1/videos", json=SUBMIT, headers={"Idempotency-Key": "k"}) for _ in range(3)
        ]
        second = await client.post("/v1/videos", json=SUBMIT)
        same_account = {"Authorization": f"Bearer {farm.new_key()}"}
        third = await client.post("/v1/videos", json=SUBMIT, headers=same_account)
        reading = await client.get("/v1/videos")
    assert [answer.status_code for answer in (first, *twins, second, third)] == [200] * 5 + [429]
    assert '"submits";r=0' in third.headers["ratelimit"]
    assert reading.status_code == 200
    assert farm.num_jobs() == 2


async def submit_when_free(client: httpx.AsyncClient) -> httpx.Response:
    """Submit as answers ask for: submits of one account wait for each other, on a slow machine for long."""
    while (answer := await client.post("/v1/videos", json=SUBMIT)).status_code == 503:
        assert (answer.json()["code"], answer.headers["retry-after"]) == ("no_database", "2")
    return answer


async def test_max_queued_is_exact_under_many_submits_at_once(client: httpx.AsyncClient, farm: Farm) -> None:
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 2}'")
    answers = await asyncio.gather(*(submit_when_free(client) for _ in range(8)))
    codes = sorted(answer.status_code for answer in answers)
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert codes == [200] * 2 + [429] * 6
    assert (refused.json()["code"], farm.num_jobs()) == ("queue_full", 2)
    assert int(refused.headers["retry-after"]) >= 1


async def test_submit_that_waits_too_long_for_others_is_told_to_come_again_and_leaves_nothing(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    key = {"Idempotency-Key": "again"}
    with unit_of_work(farm.database) as conn:
        conn.execute(text("SELECT 1 FROM account_usage FOR UPDATE"))
        refused = await client.post("/v1/videos", json=SUBMIT, headers=key)
    assert (refused.status_code, refused.json()["code"]) == (503, "no_database")
    assert "busy" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    assert farm.num_jobs() == 0
    again = await client.post("/v1/videos", json=SUBMIT, headers=key)
    assert (again.status_code, farm.num_jobs()) == (200, 1)


async def test_gpu_seconds_are_reserved_exactly_and_settled_at_the_end(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    first = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    [(estimate,)] = farm.execute("SELECT gpu_s_reserved FROM job")
    assert estimate > 0
    farm.execute("UPDATE account SET limits = jsonb_build_object('gpu_s_per_day', :s)", s=2 * estimate)
    answers = await asyncio.gather(*(client.post("/v1/videos", json=SUBMIT) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["code"] == "quota_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 86_400
    claimed = farm.start()
    assert claimed.job.id == first
    await client.post(f"/v1/videos/{first}/cancel")
    with unit_of_work(farm.database) as conn:
        assert finish_cancel(conn, first, claimed.epoch)
    shown = (await client.get("/v1/usage")).json()
    assert shown["gpu_seconds"]["reserved"] == estimate
    assert 1 <= shown["gpu_seconds"]["used"] < estimate
    assert (shown["queued"], shown["running"], shown["gpu_seconds"]["limit"]) == (1, 0, 2 * estimate)
    farm.execute("UPDATE account_usage SET day = day - 1")
    assert (await client.get("/v1/usage")).json()["gpu_seconds"]["used"] == 0


async def test_retry_needs_gpu_seconds_like_a_submit(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    await client.post(f"/v1/videos/{video_id}/cancel")
    assert farm.execute("SELECT gpu_s_reserved FROM account_usage") == [(0,)]
    farm.execute("UPDATE account SET limits = '{\"gpu_s_per_day\": 1}'")
    refused = await client.post(f"/v1/videos/{video_id}/retry")
    farm.execute("UPDATE account SET limits = '{}'")
    again = await client.post(f"/v1/videos/{video_id}/retry")
    assert (refused.json()["code"], again.status_code) == ("quota_exceeded", 200)
    assert farm.execute("SELECT u.gpu_s_reserved = j.gpu_s_reserved FROM account_usage u, job j") == [(True,)]


async def test_profiles_show_groups_queues_and_when_a_job_would_start(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    idle = {state["name"]: state for state in (await client.get("/v1/profiles")).json()["data"]}
    await client.post("/v1/videos", json=SUBMIT)
    farm.finish()
    for _ in range(2):
        await client.post("/v1/videos", json=SUBMIT)
    busy = {state["name"]: state for state in (await client.get("/v1/profiles")).json()["data"]}
    assert (idle["tiny-cpu"]["live_groups"], idle["tiny-cpu"]["estimated_start_s"]) == (1, 0.0)
    assert (busy["tiny-cpu"]["queued"], busy["tiny-cpu"]["clip_s"] > 0) == (2, True)
    assert busy["tiny-cpu"]["estimated_start_s"] > 0
    assert busy["tiny-cpu"]["oldest_queued_s"] >= 0
    others = [state for name, state in busy.items() if name != "tiny-cpu"]
    assert {(state["live_groups"], state["estimated_start_s"]) for state in others} == {(0, None)}


async def test_paused_profile_says_so_and_promises_no_start(client: httpx.AsyncClient, farm: Farm) -> None:
    with unit_of_work(farm.database) as conn:
        pause_profile(conn, "tiny-cpu", "admin:alice", "secret weights")
    answer = await client.get("/v1/profiles")
    states = {state["name"]: state for state in answer.json()["data"]}
    assert [name for name, state in states.items() if state["paused"]] == ["tiny-cpu"]
    assert (states["tiny-cpu"]["live_groups"], states["tiny-cpu"]["estimated_start_s"]) == (1, None)
    assert "secret weights" not in answer.text
