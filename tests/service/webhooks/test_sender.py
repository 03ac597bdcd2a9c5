"""The sender: one signed POST for an ending, at most one lease at a time, nothing lost on the way."""

import json
import threading
import urllib.request
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
import structlog
from pydantic import SecretStr
from standardwebhooks import Webhook

from farm.db.session import unit_of_work
from farm.db.tables import webhook_delivery, webhook_message
from farm.jobs.claim import claim
from farm.jobs.control import delete_job
from farm.jobs.job import NewAsset
from farm.jobs.lifecycle import Result, mark_running, mark_uploading, succeed
from farm.webhooks.deliveries import Outcome, Room, reclaim, record, take_due
from magi2.contract import CONTRACT_VERSION
from tests.service.webhooks.harness import PROMPT, SECRET, sending, wait_until
from tests.service.webhooks.receiver import answer

ROOM = Room(healthy=10, failing=10, per_account=10)
CLIP = b"not really a clip"


@pytest.fixture
def finish_job(database, object_store, tmp_path: Path):
    """Return a function that brings a queued job to its end, with an object in the store."""

    def finish(job_id: str) -> None:
        clip = tmp_path / "clip.mp4"
        clip.write_bytes(CLIP)
        stored = object_store.put(f"v1/test/{job_id}/video.mp4", clip, "video/mp4")
        with unit_of_work(database) as conn:
            held = claim(
                conn, group_id="grp_1", profile="tiny-cpu", boot_id="b", contract_versions=[CONTRACT_VERSION]
            )
        for move in (mark_running, mark_uploading):
            with unit_of_work(database) as conn:
                assert move(conn, job_id, held.epoch)
        asset = NewAsset("video", stored.key, stored.bytes, stored.sha256, "video/mp4", 448, 256)
        with unit_of_work(database) as conn:
            assert succeed(conn, job_id, held.epoch, Result(data={}, assets=[asset]))
            # In the transaction of the state change, before it commits:
            assert conn.execute(sa.select(sa.func.count()).select_from(webhook_message)).scalar_one() == 1

    return finish


@pytest.mark.req("F-31")
def test_a_finished_clip_is_told_once_signed_and_with_a_working_link(
    outbox, receiver, finish_job, send_until_met
) -> None:
    job_id = outbox.submit(receiver.url).id
    finish_job(job_id)
    with structlog.testing.capture_logs() as lines:
        send_until_met(outbox.are("ok"))
    (got,) = receiver.received
    body = Webhook(SECRET).verify(got.body, got.headers)
    assert (body["type"], body["data"]["id"]) == ("video.completed", job_id)
    assert got.headers["webhook-id"] == body["id"]
    assert PROMPT.encode() not in got.body
    with urllib.request.urlopen(body["data"]["urls"]["download"]) as answered:
        assert answered.read() == CLIP
    assert "webhook_attempted" in {line["event"] for line in lines}
    assert not any(private in str(lines) for private in (SECRET, PROMPT, "Signature", receiver.url))


def test_every_attempt_carries_a_fresh_link_and_otherwise_the_same_body(
    outbox, receiver, finish_job, send_until_met
) -> None:
    finish_job(outbox.submit(receiver.url).id)
    receiver.behaviour = answer(500)
    send_until_met(outbox.tried(1))
    receiver.behaviour = answer(200)
    outbox.execute("SELECT pg_sleep(1.1)")  # the store signs whole seconds
    outbox.hurry()
    send_until_met(outbox.are("ok"))
    first, second = (json.loads(got.body) for got in receiver.received)
    assert first["data"]["urls"].pop("download") != second["data"]["urls"].pop("download")
    assert first == second


def test_a_full_payload_is_the_whole_object_as_it_was(
    outbox, receiver, finish_job, send_until_met, settings
) -> None:
    outbox.endpoint(receiver.url, payload_mode="full")
    job_id = outbox.submit().id
    finish_job(job_id)
    send_until_met(outbox.are("ok"))
    data = json.loads(receiver.received[0].body)["data"]
    assert (data["prompt"], data["progress"], data["bytes"]) == (PROMPT, 100, len(CLIP))
    assert data["urls"]["content"] == f"{settings.base_url}/v1/videos/{job_id}/content"
    assert data["urls"]["download"]


def test_a_failing_receiver_is_tried_again_with_the_same_id(outbox, receiver, send_until_met) -> None:
    outbox.cancel_one(receiver.url)
    receiver.behaviour = answer(500, body=b"broken")
    send_until_met(outbox.tried(1))
    receiver.behaviour = answer(200)
    assert [row.status for row in outbox.deliveries()] == ["pending"]
    outbox.hurry()
    send_until_met(outbox.are("ok"))
    assert len({got.headers["webhook-id"] for got in receiver.received}) == 1
    log = [(row.n, row.http_status, row.error, row.response_excerpt) for row in outbox.attempts()]
    assert log == [(1, 500, "http_500", "broken"), (2, 200, None, None)]


def test_a_job_that_is_deleted_meanwhile_is_told_without_links(
    outbox, receiver, finish_job, database, send_until_met
) -> None:
    job_id = outbox.submit(receiver.url).id
    finish_job(job_id)
    with unit_of_work(database) as conn:
        delete_job(conn, outbox.account_id, job_id, "test")
    send_until_met(outbox.are("ok"))
    body = json.loads(receiver.received[0].body)
    assert body["type"] == "video.completed"
    assert set(body["data"]["urls"].values()) == {None}


def test_a_delivery_whose_sender_was_killed_goes_out_again_and_the_late_record_changes_nothing(
    outbox, database
) -> None:
    outbox.cancel_one("http://127.0.0.1:9/hook")
    with unit_of_work(database) as conn:
        (first,) = take_due(conn, ROOM)
    with unit_of_work(database) as conn:
        assert take_due(conn, ROOM) == []  # leased: nobody else gets it
        conn.execute(sa.update(webhook_delivery).values(lease_until=sa.text("now() - interval '1 second'")))
    with unit_of_work(database) as conn:
        assert reclaim(conn) == 1
        (second,) = take_due(conn, ROOM)
    assert second.message_id == first.message_id
    with unit_of_work(database) as conn:
        assert record(conn, [(first, Outcome(1, http_status=200))]).kept == frozenset()
    assert outbox.are("leased")()
    with unit_of_work(database) as conn:
        assert record(conn, [(second, Outcome(1, http_status=200))]).kept == {second.id}
    assert outbox.are("ok")()


def test_many_senders_never_take_the_same_delivery_twice(outbox, database) -> None:
    for _ in range(12):
        outbox.cancel_one("http://127.0.0.1:9/hook")
    taken: list[str] = []

    def take() -> None:
        while len(taken) < 12:
            with unit_of_work(database) as conn:
                taken.extend(delivery.id for delivery in take_due(conn, Room(3, 3, 3)))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(taken) == len(set(taken)) == 12


def test_what_the_database_could_not_take_is_recorded_later_and_not_sent_again(
    outbox, receiver, database_url, send_until_met
) -> None:
    outbox.cancel_one(receiver.url)
    released = threading.Event()

    def lock_then_answer(handler) -> None:
        with psycopg.connect(database_url) as conn:
            conn.execute("SELECT FROM webhook_endpoint FOR UPDATE")
            answer(200)(handler)
            released.wait(20)

    receiver.behaviour = lock_then_answer
    with structlog.testing.capture_logs() as lines:

        def is_recorded() -> bool:
            if any(line["event"] == "webhook_database_unreachable" for line in lines):
                released.set()
            return outbox.are("ok")()

        send_until_met(is_recorded)
    assert (len(receiver.received), len(outbox.attempts())) == (1, 1)


def test_a_secret_that_cannot_be_opened_fails_its_delivery_alone(
    outbox, receiver, settings, database, object_store
) -> None:
    outbox.cancel_one(receiver.url)
    other = settings.model_copy(update={"secret_key": SecretStr("another-key-that-is-quite-long-0123456789")})
    with sending(other, database, object_store):
        wait_until(outbox.tried(1), "the attempt")
    assert (outbox.attempts()[0].error, receiver.received) == ("not_prepared", [])
    assert outbox.are("pending")()
