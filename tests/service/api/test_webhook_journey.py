"""Management through the OpenAI SDK and a real receiver, with the api behind a real server."""

import json
from collections.abc import Iterator

import pytest
from openai import NotFoundError, OpenAI
from standardwebhooks import Webhook

from tests.service.api.conftest import SUBMIT, Farm
from tests.service.webhooks.harness import sending, wait_until
from tests.service.webhooks.receiver import Receiver, answer, hang_up

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def farm_environment(farm_environment: dict[str, str]) -> dict[str, str]:
    """Let this farm call loopback."""
    opened = {"FARM_WEBHOOK__ALLOW_HTTP": "true", "FARM_WEBHOOK__ALLOW_CIDRS": "127.0.0.0/8"}
    return {**farm_environment, **opened}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def sdk(farm: Farm, serve) -> Iterator[OpenAI]:
    with OpenAI(api_key=farm.key, base_url=f"{serve().url}/v1", max_retries=0) as client:
        yield client


def test_the_openai_sdk_manages_endpoints(sdk: OpenAI, receiver: Receiver) -> None:
    made = sdk.webhooks.create(name="ours", url=receiver.url, event_types=["video.completed"])
    assert made.signing_secret.startswith("whsec_")
    assert sdk.webhooks.retrieve(made.id).signing_secret_hint == f"whsec_...{made.signing_secret[-4:]}"
    changed = sdk.webhooks.update(made.id, name="theirs", event_types=["video.failed"])
    assert (changed.name, changed.event_types, changed.url) == ("theirs", ["video.failed"], receiver.url)
    rotated = sdk.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret != made.signing_secret
    for _ in range(3):
        sdk.webhooks.create(name="more", url=receiver.url, event_types=["video.completed"])
    assert len([endpoint.id for endpoint in sdk.webhooks.list(limit=2)]) == 4
    assert "video.completed" in sdk.webhooks.event_types.list().data
    assert sdk.webhooks.delete(made.id).deleted
    with pytest.raises(NotFoundError):
        sdk.webhooks.retrieve(made.id)


@pytest.mark.parametrize("kind", ["video.completed", "webhook.test", "video.deleted", "video.progress"])
def test_a_sample_is_sent_once_and_its_answer_returned(
    sdk: OpenAI, farm: Farm, receiver: Receiver, kind: str
) -> None:
    made = sdk.webhooks.create(name="ours", url=receiver.url, event_types=["video.failed"])
    with sending(farm.settings, farm.database, farm.store):
        result = sdk.webhooks.test(made.id, event_type=kind)
        receiver.behaviour = answer(503)
        refused = sdk.webhooks.test(made.id, event_type=kind)
    assert (result.success, result.status_code, result.event_type) == (True, 204, kind)
    assert (refused.success, refused.status_code) == (True, 503)
    body = Webhook(made.signing_secret).verify(receiver.received[0].body, receiver.received[0].headers)
    assert (body["type"], body["data"]["is_test"]) == (kind, True)
    statuses = farm.execute("SELECT status, attempts FROM webhook_delivery ORDER BY id")
    assert [tuple(row) for row in statuses] == [("ok", 1), ("dead", 1)]


@pytest.mark.req("F-11")
def test_a_repeated_sample_is_sent_once(sdk: OpenAI, farm: Farm, receiver: Receiver) -> None:
    made = sdk.webhooks.create(name="ours", url=receiver.url, event_types=["video.failed"])
    with sending(farm.settings, farm.database, farm.store):
        answers = [
            sdk.webhooks.test(
                made.id, event_type="video.failed", extra_headers={"Idempotency-Key": "k1"}
            ).to_dict()
            for _ in range(2)
        ]
    assert answers[0] == answers[1]
    assert len(receiver.received) == 1


def test_a_sample_that_nobody_answers_says_why(sdk: OpenAI, farm: Farm, receiver: Receiver) -> None:
    made = sdk.webhooks.create(name="ours", url=receiver.url, event_types=["video.failed"])
    receiver.behaviour = hang_up
    with sending(farm.settings, farm.database, farm.store):
        result = sdk.webhooks.test(made.id, event_type="video.failed").to_dict()
    assert (result["success"], result["status_code"], result["error"]) == (False, None, "connection_broken")


def test_a_sample_goes_first_however_much_is_waiting(sdk: OpenAI, farm: Farm, receiver: Receiver) -> None:
    made = sdk.webhooks.create(name="ours", url=receiver.url, event_types=["video.canceled"])
    for _ in range(3):
        job = sdk.videos.create(prompt=str(SUBMIT["prompt"]), size="448x256")  # type: ignore[arg-type]
        sdk.post(f"/videos/{job.id}/cancel", cast_to=object)
    with sending(farm.settings, farm.database, farm.store):
        sdk.webhooks.test(made.id, event_type="video.completed")
    assert json.loads(receiver.received[0].body)["type"] == "video.completed"


def test_a_sample_without_a_sender_ends_with_a_time_out_that_names_the_delivery(
    farm: Farm, sdk: OpenAI, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.webhooks.TEST_MARGIN_S", -14.5)
    made = sdk.webhooks.create(name="ours", url=receiver.url, event_types=["video.failed"])
    answered = sdk._client.post(
        f"{sdk.base_url}webhook_endpoints/{made.id}/test", headers=sdk.auth_headers, json={}
    )
    (row,) = farm.execute("SELECT id FROM webhook_delivery")
    assert (answered.status_code, answered.json()["code"]) == (504, "sync_timeout")
    assert row.id in answered.json()["detail"]


@pytest.mark.req("F-30")
def test_a_full_payload_is_the_object_that_the_api_shows(sdk: OpenAI, farm: Farm, receiver: Receiver) -> None:
    sdk.webhooks.create(
        name="ours", url=receiver.url, event_types=["video.completed"], extra_body={"payload": "full"}
    )
    job = sdk.videos.create(prompt=str(SUBMIT["prompt"]), size="448x256")  # type: ignore[arg-type]
    farm.finish()
    with sending(farm.settings, farm.database, farm.store):
        wait_until(lambda: receiver.received, "the delivery")
    shown = sdk.get(f"/videos/{job.id}", cast_to=dict[str, object])
    told = json.loads(receiver.received[0].body)["data"]
    assert told.pop("seq") == 5
    urls = told["urls"]
    assert urls.pop("download")
    assert urls.pop("self").endswith(f"/v1/videos/{job.id}")
    assert told == {name: value for name, value in shown.items() if name != "webhook"}
