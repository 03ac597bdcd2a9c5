"""Receivers that misbehave: each is a failure of its own delivery, bounded in time and size."""

import contextlib
import json

import pytest

from farm.settings import WebhookSettings
from tests.service.webhooks.harness import sending, wait_until
from tests.service.webhooks.receiver import (
    Receiver,
    answer,
    babble,
    break_off,
    drip,
    drip_head,
    gush,
    hang_up,
)

TIMEOUT_S = 2.0


@pytest.fixture
def impatient(settings):
    """Settings with a short time limit."""
    hasty = WebhookSettings(timeout_s=TIMEOUT_S)
    return settings.model_copy(update={"webhook": hasty})


@pytest.mark.parametrize(
    ("behaviour", "error", "http_status"),
    [
        (answer(301, {"location": "http://127.0.0.1:1/"}), "http_301", 301),
        (answer(302, {"location": "http://127.0.0.1:1/"}), "http_302", 302),
        (answer(307, {"location": "/elsewhere"}), "http_307", 307),
        (answer(404), "http_404", 404),
        (answer(500), "http_500", 500),
        (hang_up, "connection_broken", None),
        (break_off, "connection_broken", 200),
        (babble, "connection_broken", None),
        (drip, "timeout", 200),
        (drip_head, "timeout", None),
    ],
    ids=["301", "302", "307", "404", "500", "hang-up", "break-off", "babble", "drip", "drip-head"],
)
def test_a_failure_is_named_and_tried_again(
    settings, impatient, database, object_store, outbox, receiver, behaviour, error, http_status
) -> None:
    outbox.cancel_one(receiver.url)
    receiver.behaviour = behaviour
    # Where no time-out is wanted, a busy machine shall not bring one about.
    with sending(impatient if error == "timeout" else settings, database, object_store):
        wait_until(outbox.tried(1), "an attempt")
    (attempt,) = outbox.attempts()
    assert (attempt.error, attempt.http_status) == (error, http_status)
    assert outbox.are("pending")()
    assert [got.path for got in receiver.received] == ["/hook"]  # no redirect was followed


def test_an_endless_answer_is_read_up_to_a_limit_and_taken(outbox, receiver, send_until_met) -> None:
    outbox.cancel_one(receiver.url)
    receiver.behaviour = gush
    send_until_met(outbox.are("ok"))
    assert outbox.attempts()[0].response_excerpt == "x" * 1024


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_receiver_gets_the_time_that_it_asks_for_and_the_endpoint_waits(
    outbox, receiver, send_until_met, status
) -> None:
    endpoint = outbox.endpoint(receiver.url)
    outbox.cancel_one()
    receiver.behaviour = answer(status, {"retry-after": "120"})
    send_until_met(outbox.tried(1))
    outbox.cancel_one()  # due at once, but its endpoint rests
    with contextlib.closing(Receiver()) as other:
        outbox.cancel_one(other.url)
        send_until_met(lambda: other.received)
    assert len(receiver.received) == 1
    (row,) = outbox.execute(
        "SELECT extract(epoch FROM d.next_attempt_at - a.at) AS delivery_s,"
        " extract(epoch FROM e.paused_until - a.at) AS endpoint_s FROM webhook_endpoint e"
        " JOIN webhook_delivery d ON d.endpoint_id = e.id JOIN webhook_attempt a ON a.delivery_id = d.id"
        " WHERE e.id = :id AND a.http_status = :status",
        id=endpoint.id,
        status=status,
    )
    assert 119 < row.delivery_s < 121
    assert 119 < row.endpoint_s < 121


def test_no_receiver_may_ask_for_more_than_an_hour(outbox, receiver, send_until_met) -> None:
    outbox.cancel_one(receiver.url)
    receiver.behaviour = answer(503, {"retry-after": "999999999"})
    send_until_met(outbox.tried(1))
    (row,) = outbox.execute("SELECT extract(epoch FROM next_attempt_at - now()) AS s FROM webhook_delivery")
    assert 3500 < row.s <= 3600


def test_gone_disables_the_endpoint(outbox, receiver, send_until_met) -> None:
    outbox.cancel_one(receiver.url)
    receiver.behaviour = answer(410)
    send_until_met(outbox.are("dead"))
    (row,) = outbox.execute("SELECT enabled, disabled_reason FROM webhook_endpoint")
    assert not row.enabled
    assert "410" in row.disabled_reason
    (entry,) = outbox.execute("SELECT actor, target LIKE 'we_%' AS is_endpoint, after FROM audit_log")
    assert (entry.actor, entry.is_endpoint) == ("system", True)
    assert entry.after == {"enabled": False, "reason": row.disabled_reason}


def test_an_answer_that_is_no_text_is_kept_as_far_as_it_is_one(outbox, receiver, send_until_met) -> None:
    outbox.cancel_one(receiver.url)
    receiver.behaviour = answer(500, body=b"\x00\xff\xfeok")
    send_until_met(outbox.tried(1))
    assert outbox.attempts()[0].response_excerpt == "\ufffd\ufffdok"


@pytest.mark.req("F-30")
def test_a_receiver_that_fails_at_random_gets_everything_and_repeats_under_the_same_id(
    outbox, receiver, send_until_met
) -> None:
    """Every second message fails, then is repeated; the schedule is shortened by the test."""
    outbox.endpoint(receiver.url, max_in_flight=10)
    jobs = {outbox.cancel_one() for _ in range(12)}
    seen: dict[str, int] = {}

    def fail_first(handler) -> None:
        message = handler.headers["webhook-id"]
        seen[message] = seen.get(message, 0) + 1
        is_odd = int(message[-1], 36) % 2
        behave = (
            answer(200) if seen[message] > 1 or is_odd else (hang_up if seen[message] % 2 else answer(503))
        )
        behave(handler)

    receiver.behaviour = fail_first

    def all_taken() -> bool:
        outbox.hurry()
        return outbox.are(*["ok"] * 12)()

    send_until_met(all_taken)
    bodies = [json.loads(got.body) for got in receiver.received]
    assert {body["data"]["id"] for body in bodies} == jobs
    assert len({body["id"] for body in bodies}) == 12
    assert all(
        got.headers["webhook-id"] == body["id"] for got, body in zip(receiver.received, bodies, strict=True)
    )
