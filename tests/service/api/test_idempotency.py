"""A POST that is repeated under a key does nothing more and is answered as before (F-11)."""

import asyncio
from typing import Any

import httpx
import pytest
import sqlalchemy

from tests.service.api.conftest import SUBMIT, Farm, image_bytes

pytestmark = pytest.mark.req("F-11")


async def post(
    client: httpx.AsyncClient, key: str, path: str = "/v1/videos", **request: Any
) -> httpx.Response:
    return await client.post(path, headers={"Idempotency-Key": key}, **(request or {"json": SUBMIT}))


async def test_repeated_submit_is_answered_as_before_and_queues_nothing(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 1}'")
    first, second = await post(client, "k1"), await post(client, "k1")
    assert (second.status_code, second.text) == (200, first.text)
    assert second.headers["location"] == first.headers["location"]
    assert second.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert farm.num_jobs() == 1


async def test_spelling_boundary_and_order_do_not_make_another_request(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    extra = {"extra_params": {"resolution": "272p", "deterministic": False}}
    as_json = await post(client, "k", json={**SUBMIT, **extra})
    form = {
        **{name: str(value) for name, value in reversed(SUBMIT.items())},
        "extra_params[resolution]": "272p",
    }
    brackets = await post(
        client, '"k"', files={**_parts(form), **_parts({"extra_params[deterministic]": "false"})}
    )
    text = '{"deterministic": false, "resolution": "272p"}'
    as_text = await post(client, "k", json={**SUBMIT, "extra_params": text})
    assert {as_json.json()["id"]} == {brackets.json()["id"], as_text.json()["id"]}
    assert farm.num_jobs() == 1


async def test_key_of_another_request_is_refused(client: httpx.AsyncClient, farm: Farm) -> None:
    await post(client, "k")
    other = await post(client, "k", json={**SUBMIT, "seed": 1})
    image = await post(client, "i", files={**_parts(SUBMIT), "input_reference": ("a.png", image_bytes())})
    turned = image_bytes(size=(64, 96))
    other_image = await post(client, "i", files={**_parts(SUBMIT), "input_reference": ("a.png", turned)})
    assert image.status_code == 200
    for answer in (other, other_image):
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert farm.num_jobs() == 2


async def test_twins_that_come_together_make_one_job(client: httpx.AsyncClient, farm: Farm) -> None:
    answers = await asyncio.gather(*(post(client, "k") for _ in range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert farm.num_jobs() == 1
    assert [answer.headers.get("idempotent-replayed") for answer in answers].count(None) == 1


async def test_refused_request_leaves_its_key_free(client: httpx.AsyncClient, farm: Farm) -> None:
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 0}'")
    refused = await post(client, "k", json={**SUBMIT, "seconds": 4})
    full = await post(client, "k")
    farm.execute("UPDATE account SET limits = '{}'")
    accepted = await post(client, "k")
    assert [answer.status_code for answer in (refused, full, accepted)] == [422, 429, 200]
    assert farm.execute("SELECT count(*) FROM idempotency_key") == [(1,)]


async def test_twin_of_a_slow_request_is_told_to_come_again(client: httpx.AsyncClient, farm: Farm) -> None:
    row = "INSERT INTO idempotency_key (account_id, route, key, fingerprint) VALUES (:a, :r, 'k', 'x')"
    with farm.database.begin() as conn:
        conn.execute(sqlalchemy.text(row), {"a": farm.account_id, "r": "POST /v1/videos"})
        answer = await post(client, "k")
        conn.rollback()
    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_in_progress")
    assert answer.headers["retry-after"] == "1"
    assert (await post(client, "k")).status_code == 200


async def test_keys_of_two_accounts_and_two_calls_have_nothing_to_do_with_each_other(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    first = await post(client, "k")
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}", "Idempotency-Key": "k"}
    second = await client.post("/v1/videos", json=SUBMIT, headers=stranger)
    cancel = await post(client, "k", f"/v1/videos/{first.json()['id']}/cancel")
    assert (second.status_code, cancel.status_code) == (200, 200)
    assert second.json()["id"] != first.json()["id"]


async def test_repeated_cancel_is_answered_as_before_although_the_video_has_ended(
    client: httpx.AsyncClient,
) -> None:
    path = f"/v1/videos/{(await post(client, 's')).json()['id']}/cancel"
    first, second, without = [
        await post(client, "c", path),
        await post(client, "c", path),
        await client.post(path),
    ]
    assert (first.text, second.headers["idempotent-replayed"]) == (second.text, "true")
    assert without.status_code == 409
    other = f"/v1/videos/{(await post(client, 't', json={**SUBMIT, 'seed': 2})).json()['id']}/cancel"
    assert (await post(client, "c", other)).json()["code"] == "idempotency_key_reused"


async def test_answer_is_forgotten_after_a_day(client: httpx.AsyncClient, farm: Farm) -> None:
    first = await post(client, "k")
    farm.execute("UPDATE idempotency_key SET created_at = created_at - interval '24 hours'")
    second = await post(client, "k")
    assert first.json()["id"] != second.json()["id"]
    assert (await post(client, "k")).json()["id"] == second.json()["id"]


async def test_secret_of_a_webhook_is_repeated_but_not_kept_in_the_clear(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    wanted = {**SUBMIT, "webhook": "https://hooks.example.com/"}
    first, second = await post(client, "k", json=wanted), await post(client, "k", json=wanted)
    secret = first.json()["webhook"]["signing_secret"]
    assert second.json()["webhook"]["signing_secret"] == secret
    [(stored,)] = farm.execute("SELECT answer FROM idempotency_key")
    assert secret.encode() not in bytes(stored)
    assert SUBMIT["prompt"].encode() not in bytes(stored)


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, '""'])
async def test_key_that_is_none_is_refused(client: httpx.AsyncClient, farm: Farm, key: str) -> None:
    answer = await post(client, key)
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, "Idempotency-Key")
    assert farm.num_jobs() == 0


def _parts(fields: dict[str, Any]) -> dict[str, tuple[None, str]]:
    return {name: (None, str(value)) for name, value in fields.items()}
