"""The client in clients/python against a real server: what it promises when things go wrong."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from standardwebhooks import Webhook

from farm.webhooks.signing import new_secret
from tests.service.api.conftest import Farm, Served

PACKAGE = Path(__file__).parents[3] / "clients" / "python"
FIELDS = {"size": "448x256", "num_inference_steps": 4}


@pytest.fixture(scope="module")
def magi2_client() -> Iterator[object]:
    sys.path.insert(0, str(PACKAGE))
    import magi2_client

    yield magi2_client
    sys.path.remove(str(PACKAGE))


@pytest.fixture
def client(magi2_client, farm: Farm, serve: Callable[[], Served]):
    with magi2_client.Farm(serve().url, farm.key) as made:
        yield made


def test_submit_whose_answer_was_lost_makes_one_video(
    client, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = client._http.request, []

    def lossy(*args, **options):
        answer = real(*args, **options)
        calls.append(options["headers"]["Idempotency-Key"])
        if len(calls) == 1:
            raise httpx.ReadError("lost")
        return answer

    monkeypatch.setattr(client._http, "request", lossy)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    video = client.submit("a fox", **FIELDS)
    assert len(set(calls)) == 1
    assert farm.execute("SELECT id FROM job") == [(video["id"],)]


@pytest.mark.parametrize("has_stream", [True, False], ids=["stream", "poll"])
def test_wait_ends_with_the_video_with_and_without_a_stream(
    client, farm: Farm, monkeypatch: pytest.MonkeyPatch, has_stream
) -> None:
    video = client.submit("a fox", **FIELDS)
    if not has_stream:
        monkeypatch.setattr("magi2_client.client.LONG_POLL_S", 0)
        monkeypatch.setattr(client, "_events", lambda *_: iter(()))
    seen = []

    def show(event):
        seen.append(event)
        if len(seen) == 1:
            farm.finish()

    assert client.wait(video["id"], timeout_s=60, show=show)["status"] == "completed"
    assert client.wait(video["id"])["status"] == "completed"


def test_wait_that_is_too_long_says_so_and_leaves_the_video_alone(magi2_client, client) -> None:
    video = client.submit("a fox", **FIELDS)
    with pytest.raises(magi2_client.WaitTimeoutError, match="goes on"):
        client.wait(video["id"], timeout_s=0.2)
    assert client.get(video["id"])["state"] == "queued"
    assert client.cancel(video["id"])["state"] == "canceled"
    assert client.wait(video["id"])["error"]["code"] == "canceled"


def test_refusals_carry_code_and_every_problem(magi2_client, client) -> None:
    with pytest.raises(magi2_client.FarmError) as refused:
        client.submit("a fox", seconds=4, seed=-1)
    assert (refused.value.status, refused.value.code) == (422, "unsupported_duration")
    assert [problem["loc"] for problem in refused.value.errors] == ["seconds", "seed"]
    with pytest.raises(magi2_client.FarmError, match="not_found"):
        client.wait("video_1")


@pytest.mark.req("F-30")
def test_webhooks_of_the_reference_library_verify_and_changed_ones_do_not(magi2_client) -> None:
    secret, body = new_secret(), json.dumps({"id": "evt_1", "type": "video.completed"}).encode()
    from datetime import UTC, datetime

    at = datetime.now(UTC)
    signature = Webhook(secret).sign("evt_1", at, body.decode())
    headers = {
        "Webhook-Id": "evt_1",
        "Webhook-Timestamp": str(int(at.timestamp())),
        "Webhook-Signature": f"v1a,zzz {signature}",
    }
    assert magi2_client.verify_webhook(body, headers, secret)["id"] == "evt_1"
    old = {**headers, "Webhook-Timestamp": str(int(at.timestamp()) - 301)}
    for bad_body, bad_headers, bad_secret in (
        (body + b" ", headers, secret),
        (body, {**headers, "Webhook-Id": "evt_2"}, secret),
        (body, old, secret),
        (body, headers, new_secret()),
        (body, {}, secret),
    ):
        with pytest.raises(magi2_client.WebhookError):
            magi2_client.verify_webhook(bad_body, bad_headers, bad_secret)
